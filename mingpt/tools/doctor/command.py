"""Find out why a cluster does not start, or which job holds a run folder.

    torchrun ... -m mingpt doctor [CONFIG.yaml] [section.key=value ...]     # started as the run is
    python -m mingpt doctor --endpoint HOST:PORT                            # when no worker ever starts
    python -m mingpt doctor --claim RUN_DIR [--release]

The first, with the flags and settings of the run, prints a row per worker and a sentence per fault. Exit code
0: no fault; 1: faults (torchrun does not restart the workers); 2: a mistake on the command line (torchrun
itself exits with 1).

--endpoint tries the rendezvous endpoint of the agents (--rdzv_endpoint) from this host alone. Exit code 1 if
neither torch's store nor an agent answers there.

--claim shows the claims that keep a second job from writing to the same place: a run folder, or a folder or
URL of snapshots. --release removes these claims. Use it only where you know that the job is gone and this
machine cannot tell: a job that still runs notices that its claim is gone, and ends.
"""

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import NonRetryableError, PeersMissing, UserError
from mingpt.base.files import DriverError, reason_of
from mingpt.base.paths import typed_path
from mingpt.base.system import run_within
from mingpt.config import Config
from mingpt.config.cli import parse
from mingpt.distributed import Launch, ProcessExit
from mingpt.distributed.rendezvous import Rendezvous
from mingpt.snapshot.lookup import possible_places
from mingpt.tools.doctor.facts import FINDINGS_S, Facts, Findings, find_faults, identity, make_row
from mingpt.tools.doctor.network import (
    Exchange,
    check_endpoint,
    describe_endpoint,
    find_unreachable,
    gloo_address,
    listen,
    measure_all_reduce,
    networks,
)
from mingpt.tools.plan.command import align
from mingpt.training.claim import LEASE_S, Claim, Holder

LIMIT_S = 58.0  # of the whole check-up
MEET_S, WAIT_S, ACK_S = 20.0, 12.0, 3.0  # of the rendezvous, of a wait for values, of the last wait


def show_claims(where: str, release: bool) -> list[str]:
    """Return a line per claim to a run folder or a place of snapshots; with `release`, remove the claims.

    A line says so if there is no claim. Raises UserError if `where` is no folder or URL, or if storage fails.
    """
    if "://" not in where and not Path(where).is_dir():
        raise UserError(f"{where} is no folder: give a run folder such as out/default, or a URL of snapshots")
    lines = []
    for place in dict.fromkeys([where, *possible_places(where)]):
        claim = Claim(place, place)
        try:
            number, holder = claim.read_newest()
            if holder is None:
                continue
            lines.append(f"{place}: {describe(holder)}")
            if release:
                claim.remove(number)  # the job that held it notices that before it writes again
                lines.append(f"{place}: released")
        except DriverError as error:
            raise UserError(f"the claim to {place} cannot be used: {reason_of(error)}") from None
    return lines or [f"{where}: not claimed"]


def describe(holder: Holder) -> str:
    """Return a clause that names a claim's holder and says if its job runs, is gone or cannot be seen."""
    states = {
        True: "which is running",
        False: "which is gone: the next job takes over at once",
        None: f"which this machine cannot see: its claim holds until {LEASE_S:g} s after it was last renewed",
    }
    return f"claimed by {holder.sentence()}, {states[holder.is_alive()]}"


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
        return report([Findings(launch, config).take()])
    rank, rendezvous = launch.rank, meet(launch)
    process_exit.join(rendezvous, LIMIT_S)
    findings = Findings(launch, config)
    exchange = Exchange(rendezvous.process_group_store, rank, launch.world_size)
    exchange.put("hello", identity(launch))
    hello = exchange.get_all("hello", WAIT_S) if rank == 0 else {}
    found: Facts = {"clock_s": exchange.clock_offset_s()}
    found |= try_links(exchange)
    found |= findings.take()
    exchange.put("facts", found)
    facts = exchange.get_all("facts", WAIT_S + FINDINGS_S) if rank == 0 else {}
    if rank == 0:
        exchange.put("go", len(facts) == launch.world_size and all_connected(facts))
    go = exchange.get("go", 0, 2 * WAIT_S + FINDINGS_S)
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
        is_good, line = describe_endpoint(launch.master_addr, launch.master_port)
        if not is_good:
            raise NonRetryableError(
                f"{platform.node()} cannot use the workers' store at {endpoint} (MASTER_ADDR, MASTER_PORT): "
                f"{line}"
            )
    try:
        return Rendezvous(launch, MEET_S)
    except PeersMissing as error:
        raise NonRetryableError(
            f"{error}: look at the terminal of their node, and there at python -m mingpt doctor "
            f"--endpoint {endpoint}"
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


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "python -m mingpt doctor",
        __doc__,
        "%(prog)s [CONFIG.yaml] [section.key=value ...] | --endpoint HOST:PORT | --claim RUN_DIR [--release]",
    )
    parser.add_argument(
        "--endpoint", metavar="HOST:PORT", help="meeting point of the agents; several by commas"
    )
    parser.add_argument(
        "--claim", type=typed_path, metavar="RUN_DIR", help="run folder, or snapshots at a path or URL"
    )
    parser.add_argument("--release", action="store_true", help="drop the claim")
    options, settings = parser.parse_known_args(arguments)
    if not (options.endpoint or options.claim or options.release):
        run_checkup(settings)
    if settings or (options.release and not options.claim):
        parser.error("--endpoint, and --claim with or without --release, stand alone")
    is_good, lines = True, list[str]()
    if options.endpoint:
        is_good, lines = check_endpoint(options.endpoint)
    if options.claim:
        lines += show_claims(options.claim, options.release)
    write_lines(lines)
    return 0 if is_good else 1
