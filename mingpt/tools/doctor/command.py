"""Find out why a cluster does not start.

    torchrun ... -m mingpt doctor [CONFIG.yaml] [section.key=value ...]     # started as the run is

With the flags and settings of the run, it prints a row per worker and a sentence per fault: workers that
differ, links between nodes that do not work. Exit code 0: no fault; 1: faults (torchrun does not restart the
workers); 2: a mistake on the command line (torchrun itself exits with 1). Data and folders are checked by the
start of the trainer, which refuses them in one sentence.
"""

import platform
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import NonRetryableError, PeersMissing, UserError
from mingpt.base.files import reason_of
from mingpt.base.system import run_within
from mingpt.config import Config
from mingpt.config.cli import parse
from mingpt.distributed import Launch, ProcessExit
from mingpt.distributed.rendezvous import Rendezvous
from mingpt.tools.doctor.facts import Facts, find_faults, find_own, identity, make_row
from mingpt.tools.doctor.network import (
    Exchange,
    connect,
    find_unreachable,
    gloo_address,
    listen,
    measure_all_reduce,
    named_address,
    networks,
)
from mingpt.tools.plan import align

LIMIT_S = 58.0  # of the whole check-up
MEET_S, WAIT_S, ACK_S = 20.0, 12.0, 3.0  # of the rendezvous, of a wait for values, of the last wait
FACTS_S = 32.0  # of the wait for a worker's facts: importing torch may take a while


def run_checkup(argv: Sequence[str]) -> NoReturn:
    """Check up on all workers, then exit this process; a fault ends the job without restarts. Collective.

    The exit code is 0 without faults, 1 after a fault or a failure of the check-up, and 2 after a mistake in
    `argv`, the settings of the run.
    """
    launch = Launch.from_environment()
    process_exit = ProcessExit(launch)
    try:
        config = parse(argv)
        faults = run_within(LIMIT_S, lambda: examine(launch, config, process_exit))
        if faults:
            raise NonRetryableError(f"{faults} {'fault' if faults == 1 else 'faults'} found")
    except (UserError, NonRetryableError) as error:
        process_exit.abort_job(error, lambda: False)
    except Exception as error:  # a check-up that fails or hangs would do so again in each generation
        what = f"worker {launch.rank} on {platform.node()} failed: {reason_of(error)}"
        process_exit.abort_job(NonRetryableError(what), lambda: False)
    process_exit.exit_process(None)


def examine(launch: Launch, config: Config, process_exit: ProcessExit) -> int:
    """Run the check-up with all workers; return the number of faults, the same on all ranks. Collective.

    Rank 0 prints the report. Raises NonRetryableError if workers do not arrive or rank 0 stops answering.
    """
    if not launch.is_distributed:
        name_error = None if named_address() else "its host name does not resolve to an address of its own"
        return report([identity(launch) | find_own(launch, config) | {"name_error": name_error}])
    rank, rendezvous = launch.rank, meet(launch)
    process_exit.join(rendezvous, LIMIT_S)
    exchange = Exchange(rendezvous.process_group_store, rank, launch.world_size)
    exchange.put("hello", identity(launch))
    hello = exchange.get_all("hello", WAIT_S) if rank == 0 else {}
    found = identity(launch) | {"clock_s": exchange.clock_offset_s()}
    found |= try_links(exchange) | find_own(launch, config)
    exchange.put("facts", found)
    facts = exchange.get_all("facts", FACTS_S) if rank == 0 else {}
    if rank == 0:
        exchange.put("go", len(facts) == launch.world_size and all_connected(facts))
    go = exchange.get("go", 0, WAIT_S + FACTS_S)
    if go:
        gpu = launch.local_rank if found.get("device_type") == "cuda" else None
        exchange.put("all_reduce", measure_all_reduce(exchange, gpu))
    if rank == 0:
        rates = exchange.get_all("all_reduce", 2 * WAIT_S) if go else {}
        exchange.put("faults", report(join_facts(hello, facts, rates)))
    faults = exchange.get("faults", 0, LIMIT_S)
    exchange.put("done", True)
    if rank == 0:  # rank 0 may host the store, which the others still read
        exchange.get_all("done", ACK_S)
    if faults is None:
        raise NonRetryableError(f"rank 0 did not answer worker {rank} on {platform.node()} any more")
    return int(faults)


def meet(launch: Launch) -> Rendezvous:
    """Meet all workers. Collective.

    Raises NonRetryableError if a worker or an agent's store cannot be reached, DistError for rank 0's store.
    """
    assert launch.master_addr is not None
    endpoint = f"{launch.master_addr}:{launch.master_port}"
    if launch.agent_hosts_store:  # the store exists before the workers do
        try:
            connect(launch.master_addr, launch.master_port).close()
        except OSError as error:
            raise NonRetryableError(
                f"{platform.node()} cannot use the workers' store at {endpoint} (MASTER_ADDR, MASTER_PORT): "
                f"{error}: look at that address, and open its TCP port to this host"
            ) from None
    try:
        return Rendezvous(launch, MEET_S)
    except PeersMissing as error:
        raise NonRetryableError(
            f"{error}: look at the terminal of their node, and whether it reaches TCP port {endpoint}"
        ) from None


def join_facts(
    hello: Mapping[int, Facts], facts: Mapping[int, Facts], rates: Mapping[int, Any]
) -> list[Facts]:
    """Return the facts of each worker: `hello` joined with the later `facts` and the all-reduce's result.

    All three are by rank. A worker without `facts` is marked `unfinished`. `rates` has (MB/s, error); it
    is empty if no all-reduce was run.
    """
    workers = []
    for rank, worker in {**hello, **facts}.items():
        there = facts.get(rank, worker | {"unfinished": "it has stopped answering in this check-up"})
        rate, error = rates.get(rank, (None, "no answer" if rates else None))
        workers.append(there | {"all_reduce_mb_s": rate, "all_reduce_error": error})
    return workers


def try_links(exchange: Exchange) -> Facts:
    """Listen at gloo's address, connect to all others that listen, and return what was found. Collective.

    The facts are `networks`; `address`, if gloo finds one; `address_error`, if it finds none or this worker
    cannot listen there; and `unreachable`, a list of (rank, reason).
    """
    found: Facts = {"networks": networks()}
    port = None
    try:
        found["address"] = gloo_address(found["networks"])
        port = listen(found["address"])
    except OSError as error:
        found["address_error"] = str(error)
    exchange.put("address", [found.get("address"), port])
    addresses = exchange.get_all("address", WAIT_S)
    targets = {
        rank: (address, port) for rank, (address, port) in addresses.items() if port and rank != exchange.rank
    }
    found["unreachable"] = list(find_unreachable(targets).items())
    return found


def all_connected(facts: Mapping[int, Facts]) -> bool:
    """Whether the workers in `facts`, {rank: facts}, all listen, reach each other, and have good devices.

    The devices must be of one type. Workers that are missing in `facts` are not noticed.
    """
    kinds = {there.get("device_type") for there in facts.values()}
    return len(kinds) == 1 and all(
        not there.get("address_error") and not there["unreachable"] and not there.get("device_error")
        for there in facts.values()
    )


def report(workers: Sequence[Facts]) -> int:
    """Print a row per worker and a line per fault, or "no fault found"; return the number of faults."""
    faults = find_faults(workers)
    rows = [make_row(worker) for worker in workers]
    lines = [*align([list(rows[0]), *(list(row.values()) for row in rows)]), ""]
    lines += [f"fault: {fault}" for fault in faults] or ["no fault found"]
    write_lines(lines)
    return len(faults)


def main(arguments: Sequence[str]) -> NoReturn:
    parser = CommandParser(
        "python -m mingpt doctor", __doc__, "%(prog)s [CONFIG.yaml] [section.key=value ...]"
    )
    _, settings = parser.parse_known_args(arguments)
    run_checkup(settings)
