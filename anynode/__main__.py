"""python -m anynode: run torchrun on this node of a job whose nodes may die, join or leave.

    python -m anynode --nnodes MIN:MAX --nproc N --rdzv PLACE --local_addr A -- script.py ...
    python -m anynode --serve HOST:PORT

The second form serves a board, where agents find each other, on a host that outlives the nodes. It needs no
torch.
"""

import sys

from anynode.command import run_node

if __name__ == "__main__":
    run_node(sys.argv[1:])
