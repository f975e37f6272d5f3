"""What the workers of a healthy cluster of three nodes find out."""

from mingpt.tools.doctor.facts import Facts

MB = 1_000_000
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
        "folders": {"run_dir out/a": None, "the snapshot folder out/a/snapshots": None},
        "probe": f"doctor-{number}",
        "state_bytes": 10 * MB,
        "memory_path": "/dev/shm",
        "memory_free": 500 * MB,
        "networks": {"lo": "127.0.0.1/8", "eth0": f"10.0.0.{number}/24"},
        "address": f"10.0.0.{number}",
        "ports": "32768-60999",
        "clock_s": 0.001,
        "all_reduce_mb_s": 900.0,
        "all_reduce_error": None,
    }


CLUSTER = [healthy(number) for number in (1, 2, 3)]
