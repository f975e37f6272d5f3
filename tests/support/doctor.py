"""What the workers of a healthy cluster of three nodes find out."""

from mingpt.tools.doctor.facts import Facts

CONFIG = {"model.n_layer": 3, "optimizer.learning_rate": 0.007, "seed": 1}


def healthy(number: int) -> Facts:
    """Worker `number` - 1, alone on node `number`."""
    return {
        "rank": number - 1,
        "node": number - 1,
        "host": f"node{number}",
        "local_rank": 0,
        "torch": "2.13.0+cpu",
        "threads": 1,
        "device": "cpu AVX512",
        "device_type": "cpu",
        "config": dict(CONFIG),
        "data_path": "play.txt",
        "data": "ab" * 32,
        "folders": "written, read",
        "memory": "500.0 MB free, 20.0 MB needed",
        "networks": {"lo": "127.0.0.1/8", "eth0": f"10.0.0.{number}/24"},
        "address": f"10.0.0.{number}",
        "ports": "32768-60999",
        "clock_s": 0.001,
        "all_reduce_mb_s": 900.0,
        "all_reduce_error": None,
    }


CLUSTER = [healthy(number) for number in (1, 2, 3)]
