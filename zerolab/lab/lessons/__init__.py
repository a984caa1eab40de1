"""The lessons' rooms: what belongs to one lesson alone.

Its exercises, the mistakes that learners make in them and how each is known, and what only its notebook uses: the
recorded steps of lesson 9, the allocator of 10, the crashes of 11, the pipeline of 15, the patients of 17.
"""
