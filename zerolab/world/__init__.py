"""Who the ranks are: `environment` joins the world that there is, `processes` makes one here, by `nursery` if asked."""
