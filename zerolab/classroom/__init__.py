"""`zerolab classroom`: a JupyterLab for each student on one machine, and GPUs that are lent to them.

run.py is the command. labs.py starts the servers and keeps them running, watch.py watches memory and processes, and
board.py shows how far the class is. broker.py lends GPUs; in a notebook, lab/ranks/lease.py asks for them. hub.py
puts the course under JupyterHub instead.
"""
