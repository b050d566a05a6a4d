"""What was best for a workload in other places: on another device, or with other software on this one."""

from __future__ import annotations

from itertools import islice

from autotune.device import DeviceIdentity
from autotune.store.records import Key
from autotune.store.store import Store
from autotune.task import Config, config_key

BEST = 3
"""Candidates of other places that a search begins with."""


def winners(store: Store, key: Key) -> list[Config]:
    """The best candidates of a workload elsewhere, each once. Those of this device with other software come first, then
    those of devices of its architecture, then of others of its kind; a GPU's are nothing for a CPU."""
    measured = store.elsewhere(key, BEST)
    devices = store.get_devices({key.device, *(m.key.device for m in measured)})
    here = devices.get(key.device)
    if here is None:
        return []
    near = [m for m in measured if m.key.device in devices and devices[m.key.device].kind == here.kind]
    near.sort(key=lambda m: (m.key.device != key.device, _architecture(devices[m.key.device]) != _architecture(here)))
    return list(islice({config_key(m.config): m.config for m in near}.values(), BEST))


def _architecture(device: DeviceIdentity) -> tuple[object, ...]:
    return device.capability, device.count, device.links
