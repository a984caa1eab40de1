"""`zerolab classroom`: a JupyterLab for each student on one machine, and GPUs that are leased.

broker.py lends GPUs, lease.py asks for them in a notebook; labs.py starts the servers and keeps them, watch.py looks at
memory and processes, board.py shows how far the room is.
"""
