"""The lessons' rooms: what belongs to one lesson alone, its exercises and the mistakes that learners make in them."""
