"""python -m anynode: run torchrun on this node of a job whose nodes may die, join or leave.

    python -m anynode --nnodes MIN:MAX --nproc N --rdzv PLACE --local_addr A -- script.py ...
    python -m anynode --serve HOST:PORT

PLACE, where torchrun's agents find each other, is a shared folder or HOST:PORT[,HOST:PORT...]. A is this
node's address. The second form needs no torch. On a host that outlives the nodes, it makes HOST:PORT a PLACE.
"""

import sys

from anynode.command import run_node

if __name__ == "__main__":
    run_node(sys.argv[1:])
