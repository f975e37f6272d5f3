"""Record the collectives that a process calls, and give their results only to those who wait for them."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tutorial.checks.processes import Refused
from tutorial.checks.sends import COLLECTIVES, replace


class LateWork:
    """A collective that has begun. The learner's tensors have its result once `wait` has returned.

    On this machine results come so fast that who forgets to wait would seldom see it.
    """

    def __init__(self, work: dist.Work, copies: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        self.work, self.copies, self.outputs, self.is_waited_for = work, copies, outputs, False

    def wait(self, timeout: Any = None) -> bool:
        self.work.wait()
        if not self.is_waited_for:
            for copy, output in zip(self.copies, self.outputs, strict=True):
                output.detach().copy_(copy)
        self.is_waited_for = True
        return True

    def is_completed(self) -> bool:
        return self.work.is_completed() and self.wait()

    def get_future(self) -> None:
        raise Refused("It calls get_future; the exercise is to be done with wait()")


class Collectives:
    """The calls of this process, by the phase that the check sets, and the works not waited for."""

    def __init__(self) -> None:
        self.phase, self.calls, self.works = "", list[str](), list[LateWork]()
        self.blocking = 0  # calls that returned with the result, so that nothing could go on meanwhile
        self.is_inside = False  # one collective may be written by means of another
        for name in COLLECTIVES:
            if hasattr(distributed_c10d, name):
                replace(name, self.record(getattr(distributed_c10d, name)))

    def record(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)
        first = next(iter(signature.parameters))  # where the result goes: a tensor, or a list of tensors

        def call(*arguments: Any, **options: Any) -> Any:
            if self.is_inside:
                return original(*arguments, **options)
            given = signature.bind(*arguments, **options).arguments
            is_async, output = given.get("async_op", False), given[first]
            self.calls.append(self.phase)
            self.blocking += not is_async and self.phase == "backward"
            outputs = output if isinstance(output, list) else [output]
            copies = [tensor.detach().clone() for tensor in outputs] if is_async else outputs
            self.is_inside = True
            try:
                given[first] = copies if isinstance(output, list) else copies[0]
                begun = original(**given)
            finally:
                self.is_inside = False
            if not is_async:
                return begun
            self.works.append(LateWork(begun, copies, outputs))
            return self.works[-1]

        return call

    def not_waited_for(self) -> int:
        return sum(not work.is_waited_for for work in self.works)
