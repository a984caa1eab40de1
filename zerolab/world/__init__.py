"""Who the ranks are, and fresh processes to be them."""
