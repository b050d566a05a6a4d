"""The base classes of a domain: what is needed, what has a default, and how a domain is found."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from autotune import task
from autotune.device import DeviceIdentity, identify
from autotune.domain import Command, Domain, domain_of, figure_of, has_figures, identity_of, known_domain, policy_for
from autotune.errors import UserError
from autotune.measure.policy import default_policy
from autotune.space import Parameter, Space
from autotune.task import Artifact, Bench, Config, Task
from autotune.workload import Workload

WORK = Workload("least", {"n": 1})


class LeastTask(Task):
    def __init__(self, workload: Workload, device: str) -> None:
        self.workload, self.device = workload, device

    def space(self, file: str | None = None) -> Space:
        return Space((Parameter("block", (1, 2)),))

    def default(self) -> Config:
        return {"block": 1}

    def build(self, config: Config) -> Artifact:
        return Artifact("cpu", ())


class Least(Domain):
    def open_task(self, workload: Workload, device: str) -> Task:
        return LeastTask(workload, device)


@pytest.fixture
def least(monkeypatch: pytest.MonkeyPatch) -> Domain:
    module: Any = ModuleType("least_domain")
    module.DOMAIN = Least()
    monkeypatch.setitem(sys.modules, "least_domain", module)
    monkeypatch.setitem(task.DOMAINS, "least", "least_domain")
    return domain_of("least")


def test_a_domain_with_the_earlier_name_of_identity_is_asked_by_the_new_one() -> None:
    class Earlier(Least):
        def place(self, workload: Workload, device: str) -> DeviceIdentity:
            return replace(identify("cpu"), count=3)

    assert Earlier().identity(WORK, "cpu").count == 3


def test_a_domain_of_one_method_has_defaults_for_all_else(least: Domain) -> None:
    assert identity_of(WORK, "cpu") == identify("cpu")
    assert policy_for(WORK, "cpu") == default_policy("cpu")
    assert (least.devices(WORK), least.bytes_moved(WORK), least.bytes_held(WORK)) == (1, 0, 0)
    assert (least.confined(WORK), least.damage(WORK), least.figure(WORK, 1.0)) == (None, None, None)
    assert (least.command("search"), least.missed(None, "cpu"), least.own_missed) == (None, None, False)
    assert list(least.targets()) == []
    assert not has_figures("least")
    assert figure_of(WORK) is None
    with pytest.raises(UserError, match="anything: this domain has no targets"):
        least.workloads_of("anything", None)


def test_a_task_of_three_methods_has_defaults_for_all_else(least: Domain) -> None:
    made = least.open_task(WORK, "cpu")
    config = {"block": 2}
    assert (made.normalize(config), made.reject(config), made.adapt(config)) == (config, None, None)
    assert (made.least_us(), made.predict(config), list(made.seeds()), list(made.compositions(3))) == (
        None,
        None,
        [],
        [],
    )
    assert made.space_for(config) == made.space()
    assert made.under("", {}) is made
    with pytest.raises(UserError, match="searches of least workloads have no method 'greedy'"):
        made.under("greedy", {})


def test_a_task_or_a_bench_without_required_methods_cannot_be_made() -> None:
    for incomplete in (Task, Bench):
        with pytest.raises(TypeError, match="abstract"):
            incomplete()  # type: ignore[abstract]


def test_a_module_without_a_domain_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(task.DOMAINS, "json", "json")
    with pytest.raises(
        UserError, match=r"the module json of the domain 'json' needs DOMAIN, an instance of autotune\.domain"
    ):
        domain_of("json")
    with pytest.raises(UserError, match="unknown domain 'gone'; the domains are c3, fusion, json, kernel, product"):
        domain_of("gone")
    assert known_domain("gone") is None
    assert known_domain(3) is None


def test_a_domain_brings_its_options_and_its_command_along(least: Domain, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.cli.app import main

    seen: list[argparse.Namespace] = []

    def add_arguments(self: Least, command: str, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--depth", type=int, help=f"of {command}")

    def command(self: Least, name: str) -> Command | None:
        return (lambda args: seen.append(args) or 7) if name == "search" else None

    monkeypatch.setattr(Least, "add_arguments", add_arguments, raising=False)
    monkeypatch.setattr(Least, "command", command, raising=False)
    assert main(["search", "least", "anything", "--depth", "3", "--trials", "2"]) == 7
    assert [(args.domain, args.target, args.depth, args.trials) for args in seen] == [("least", "anything", 3, 2)]
    with pytest.raises(SystemExit):
        main(["search", "fusion", "layer_norm", "--depth", "3"])
