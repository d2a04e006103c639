"""From settings to a pipeline: in this process, in child processes, or of stages that run already."""

from __future__ import annotations

from functools import partial
from typing import Any

from meshpipe.cli.arguments import flags_of
from meshpipe.configuration import Configuration, Configured, settings
from meshpipe.errors import UsageError
from meshpipe.pipeline.coordinator import QUEUE
from meshpipe.pipeline.local import open_local
from meshpipe.pipeline.remote import open_remote, open_spawned
from meshpipe.portal import Opener
from meshpipe.topology.layout import read_topology


def pipeline_of(configured: Configured) -> Opener:
    """The pipeline that the settings ask for, not opened yet. Blocks: reads the topology, keys, certificates.

    Raises UsageError for settings that do not go together.
    """
    chosen = configured.settings
    if chosen.topology is not None:
        return _connected(configured)
    if chosen.model is None:
        raise UsageError("name the model with --model, or the stages with --topology")
    if chosen.spawn:
        return _spawned(configured, chosen.model)
    for name, where in (
        ("delay_ms", "use --spawn"),
        ("activation", "use --spawn, or say it in the topology file of --topology"),
    ):
        if getattr(chosen, name) != settings()[name].default:
            raise UsageError(f"{configured.say(name)} concerns links: {where}")
    if chosen.local_fallback:
        raise UsageError(
            f"{configured.say('local_fallback')} is for stages elsewhere: here all are in this process already"
        )
    return partial(
        open_local,
        chosen.model,
        chosen.split,
        stall_deadline=chosen.stall_deadline,
        queue=max(QUEUE, chosen.queue),
        **chosen.stage_engine(),
    )


def _connected(configured: Configured) -> Opener:
    """Lanes and context, where somebody asked for them, are the least that every stage must have."""
    chosen = configured.settings
    assert chosen.topology is not None
    for name in ("split", "spawn", "delay_ms", "activation"):
        if configured.given(name):
            raise UsageError(
                f"{configured.say('topology')} says what the stages are: leave out {configured.say(name)}"
            )
    for setting in settings().values():
        at_stage = setting.group == "engine" and setting.name not in ("lanes", "context")
        if at_stage and not chosen.local_fallback and configured.origins[setting.name] == setting.flag:
            raise UsageError(f"{setting.flag} is for the machines of the stages: give it to `meshpipe stage`")
    topology = read_topology(chosen.topology)
    return partial(
        open_remote,
        topology,
        chosen.model,
        local_fallback=chosen.fallback(chosen.model or topology.model),
        lanes=chosen.lanes if configured.given("lanes") else 1,
        context=chosen.context if configured.given("context") else 1,
        lock=chosen.topology_lock(),
        **_remote_options(chosen),
    )


def _spawned(configured: Configured, model: str) -> Opener:
    chosen = configured.settings
    return partial(
        open_spawned,
        model,
        chosen.split,
        stage_arguments=flags_of(
            configured, "engine", "links", "security", but=("lanes", "context", "threads", "mtp")
        ),
        conditions=chosen.spawn_conditions(),
        activation=chosen.activation,
        lanes=chosen.lanes,
        context=chosen.context,
        threads=chosen.threads,
        mtp=chosen.mtp,
        ready_deadline=chosen.ready_deadline,
        local_fallback=chosen.fallback(model),
        **_remote_options(chosen),
    )


def _remote_options(chosen: Configuration) -> dict[str, Any]:
    """What stages in other processes have in common. Blocks: reads keys and certificates."""
    return {
        "security": chosen.security(),
        "direct": chosen.direct_return,
        "listen_host": chosen.return_host,
        "heartbeat": chosen.links_heartbeat(),
        "connect_deadline": chosen.connect_deadline,
        "stall_deadline": chosen.stall_deadline,
        "resume_deadline": chosen.resume_deadline,
        "queue_deadline": chosen.queue_deadline,
        "max_round_trip": chosen.max_round_trip,
        "same_bits": chosen.same_bits,
        "queue": max(QUEUE, chosen.queue),
    }
