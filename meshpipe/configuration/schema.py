"""Every setting of meshpipe, once: its name, what it may be, its default, and what it is for.

A setting has one name everywhere: `n_gpu_layers` in a file is `MESHPIPE_N_GPU_LAYERS` in the environment and
`--n-gpu-layers` on a command line. Defaults and bounds are those of the classes that use them
(`EngineOptions`, `Speculation`, `NgramConfig`, `Sampling`, `Heartbeat`), and tests/test_configuration.py sees to
it that none of their fields is missing here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import attrs
from attrs import frozen

from meshpipe.configuration.kinds import Choice, File, Integer, Kind, Many, Number, Switch, Text
from meshpipe.errors import UsageError
from meshpipe.llama.options import CACHE_TYPES, INTEGERS, ROPE_SCALING, SPLIT_MODES, EngineOptions
from meshpipe.llama.sampling import BOUNDS
from meshpipe.messages import Sampling
from meshpipe.pipeline.children import READY_DEADLINE
from meshpipe.pipeline.coordinator import QUEUE_DEADLINE, RESUME_DEADLINE, STALL_DEADLINE
from meshpipe.pipeline.fallback import LocalFallback
from meshpipe.pipeline.kept import KEEP_ROWS
from meshpipe.speculation.ngram import KINDS, LIMITS, NgramConfig
from meshpipe.speculation.policy import DEPTHS, WIDTHS
from meshpipe.speculation.settings import MODES, MTP_AT, MTP_MAX, MTP_TAIL, THREADS, Speculation
from meshpipe.topology.layout import ACTIVATIONS
from meshpipe.topology.lock import Lock, read_lock
from meshpipe.wire.conditions import Conditions
from meshpipe.wire.endpoints import WARM_UP
from meshpipe.wire.link import Heartbeat
from meshpipe.wire.security import Security, client_context, server_context, shared_key

MOST_TOKENS = 2**31 - 1
SECONDS = Number(0.001, 1e6)


def _setting(group: str, kind: Kind, help: str, default: Any = None, *, unset: str = "unset") -> Any:
    """A field of `Configuration`. Without a default it may be unset; `unset` says what that means."""
    return attrs.field(default=default, metadata={"group": group, "kind": kind, "help": help, "unset": unset})


def _default(of: type, name: str) -> Any:
    return attrs.fields_dict(of)[name].default


def _sampling(name: str, help: str) -> Any:
    low, high = BOUNDS[name]
    whole = isinstance(low, int)
    kind: Kind = Integer(int(low), int(high)) if whole else Number(low, high)
    return _setting("sampling", kind, help, _default(Sampling, name))


def _ngram(name: str, help: str) -> Any:
    return _setting("speculation", Integer(*LIMITS[name]), help, _default(NgramConfig, name))


def _engine(name: str, kind: Kind, help: str, unset: str = "llama.cpp's default") -> Any:
    return _setting("engine", kind, help, _default(EngineOptions, name), unset=unset)


def _engine_integer(name: str, help: str) -> Any:
    return _engine(name, Integer(*INTEGERS[name]), help)


@frozen(kw_only=True)
class Configuration:
    """All settings with their values, each of its kind. Made by `meshpipe.configuration.configure`."""

    model: str | None = _setting("pipeline", File(), "GGUF file (of a model in several files, the first)")
    split: str = _setting("pipeline", Text("SPLIT", "0,15,30 or 2"), "boundaries, or a number of stages", "1")
    spawn: bool = _setting("pipeline", Switch(), "a child process for each stage", False)
    topology: str | None = _setting(
        "pipeline", File(), "topology file (TOML or JSON) of stages that run already"
    )
    delay_ms: float = _setting(
        "pipeline", Number(0, 1e5), "with spawn: one-way delay put on every link, for trying", 0.0
    )
    activation: str = _setting(
        "pipeline",
        Choice(ACTIVATIONS),
        "how activations travel; all but float32 change the output",
        "float32",
    )
    direct_return: bool = _setting(
        "pipeline", Switch(), "let the coordinator open the return stream to the last stage", True
    )
    return_host: str = _setting(
        "pipeline",
        Text("HOST"),
        "where a return stream from the last stage is awaited otherwise",
        "127.0.0.1",
    )
    ready_deadline: float = _setting(
        "pipeline", SECONDS, "with spawn: seconds until a child has loaded its stage", READY_DEADLINE
    )
    stall_deadline: float = _setting(
        "pipeline", SECONDS, "seconds without progress after which a request gives up", STALL_DEADLINE
    )
    resume_deadline: float = _setting(
        "pipeline",
        SECONDS,
        "seconds that requests wait for a lost stage, or another in its place",
        RESUME_DEADLINE,
    )
    queue_deadline: float = _setting(
        "pipeline",
        SECONDS,
        "seconds that a new request waits for a broken pipeline for which no stage is found",
        QUEUE_DEADLINE,
    )
    same_bits: bool = _setting(
        "pipeline",
        Switch(),
        "let no stage take over whose bits may differ; otherwise reports say so (exact: false)",
        False,
    )
    local_fallback: bool = _setting(
        "pipeline",
        Switch(),
        "serve from this process while a stage is lost and none takes its place; the whole model must be here",
        False,
    )
    max_round_trip: float | None = _setting(
        "pipeline", SECONDS, "seconds of a round trip above which no pipeline is formed", unset="any"
    )

    lanes: int = _setting("engine", Integer(1, 255), "sessions at a time; with topology: at least", 1)
    context: int = _setting(
        "engine", Integer(1, MOST_TOKENS), "tokens of a lane; with topology: at least", 4096
    )
    threads: int = _setting("engine", Integer(1, 512), "threads of a stage", 1)
    exact: bool = _setting(
        "engine",
        Switch(),
        "keep decodes in shapes that do not change the output; without, prefill is faster and output may differ "
        "from the unsplit model's",
        True,
    )
    mtp: bool = _setting(
        "engine", Switch(), "the last stage drafts with the model's NextN layers, if any", True
    )
    n_gpu_layers: int | None = _engine_integer("n_gpu_layers", "layers on the GPU, -1 for all")
    main_gpu: int | None = _engine_integer("main_gpu", "the GPU, where one is used")
    devices: tuple[str, ...] | None = _engine("devices", Many(Text("NAME")), "names of devices to use")
    split_mode: str | None = _engine("split_mode", Choice(tuple(SPLIT_MODES)), "how GPUs share a stage")
    tensor_split: tuple[float, ...] | None = _engine(
        "tensor_split", Many(Number(0)), "shares of the GPUs of a stage"
    )
    mmap: bool = _engine("mmap", Switch(), "map the file instead of reading it")
    mlock: bool = _engine("mlock", Switch(), "keep the model in memory")
    cache_type_k: str = _engine("cache_type_k", Choice(tuple(CACHE_TYPES)), "type of the cache's keys")
    cache_type_v: str = _engine("cache_type_v", Choice(tuple(CACHE_TYPES)), "type of the cache's values")
    rope_scaling: str | None = _engine(
        "rope_scaling", Choice(tuple(ROPE_SCALING)), "how positions beyond the trained context are scaled"
    )
    rope_freq_base: float | None = _engine("rope_freq_base", Number(0), "base frequency of RoPE")
    rope_freq_scale: float | None = _engine("rope_freq_scale", Number(0), "factor of RoPE's frequencies")
    yarn_orig_ctx: int | None = _engine_integer("yarn_orig_ctx", "the context that the model was trained on")
    yarn_ext_factor: float | None = _engine("yarn_ext_factor", Number(), "YaRN: extrapolation mix")
    yarn_attn_factor: float | None = _engine("yarn_attn_factor", Number(), "YaRN: scale of attention")
    yarn_beta_fast: float | None = _engine("yarn_beta_fast", Number(), "YaRN: low correction")
    yarn_beta_slow: float | None = _engine("yarn_beta_slow", Number(), "YaRN: high correction")
    offload_kqv: bool | None = _engine("offload_kqv", Switch(), "keep the cache on the GPU")
    op_offload: bool | None = _engine("op_offload", Switch(), "let the GPU compute for layers in main memory")
    batch: int = _engine_integer("batch", "most rows of a decode where exactness is not asked for")
    memory_limit: float | None = _engine(
        "memory_limit",
        Number(0),
        "main memory that a stage may take, in GiB",
        "what is there; weights that are mapped may exceed it",
    )
    repack: bool = _engine("repack", Switch(), "CPU weight repacking, after a trial in a child process")

    speculation: str = _setting(
        "speculation", Choice(MODES), "what runs ahead of the model", _default(Speculation, "mode")
    )
    depth: int | Literal["auto"] = _setting(
        "speculation", Integer(*DEPTHS, auto=True), "windows in flight", _default(Speculation, "depth")
    )
    width: int | Literal["auto"] = _setting(
        "speculation", Integer(*WIDTHS, auto=True), "tokens of a window", _default(Speculation, "width")
    )
    max_width: int = _setting(
        "speculation", Integer(*WIDTHS), "bound of an automatic width", _default(Speculation, "max_width")
    )
    mtp_at: str = _setting(
        "speculation",
        Choice(MTP_AT),
        "where native MTP drafts; auto: at the coordinator if it has the NextN layers, else at the last stage",
        _default(Speculation, "mtp_at"),
    )
    mtp_max: int = _setting(
        "speculation",
        Integer(*MTP_MAX),
        "tokens that native MTP at the last stage drafts at a time",
        _default(Speculation, "mtp_max"),
    )
    mtp_tail: int = _setting(
        "speculation",
        Integer(*MTP_TAIL),
        "tokens at a prompt's end whose hidden rows native MTP at the coordinator is sent",
        _default(Speculation, "mtp_tail"),
    )
    draft: str | None = _setting(
        "speculation", File(), "a small model with the same vocabulary, to run ahead of the model"
    )
    draft_threads: int = _setting(
        "speculation", Integer(*THREADS), "threads of the draft model", _default(Speculation, "draft_threads")
    )
    ngram_kind: Literal["suffix", "cache"] = _setting(
        "speculation", Choice(KINDS), "index of the text at hand", _default(NgramConfig, "kind")
    )
    ngram_min_n: int = _ngram("min_n", "shortest context that the cache kind keeps")
    ngram_max_n: int = _ngram("max_n", "longest context that the cache kind keeps")
    ngram_min_match: int = _ngram("min_match", "tokens that must agree before a proposal")
    ngram_max_tokens: int = _ngram("max_tokens", "longest proposal")
    ngram_max_indexed: int = _ngram("max_indexed", "committed tokens that are indexed")

    temperature: float = _sampling("temperature", "0 takes the likeliest token")
    top_k: int = _sampling("top_k", "tokens to choose from")
    top_p: float = _sampling("top_p", "share of probability to choose from")
    min_p: float = _sampling("min_p", "least probability beside the likeliest token's")
    seed: int = _sampling("seed", "the same seed gives the same tokens")
    repeat_penalty: float = _sampling("repeat_penalty", "factor against tokens that occurred; 1: none")
    frequency_penalty: float = _sampling("frequency_penalty", "for each time that a token occurred")
    presence_penalty: float = _sampling("presence_penalty", "for tokens that occurred")
    penalty_last_n: int = _sampling("penalty_last_n", "tokens back that penalties look")

    heartbeat: float = _setting("links", SECONDS, "seconds between pings", _default(Heartbeat, "every"))
    heartbeat_deadline: float = _setting(
        "links", SECONDS, "seconds of silence after which a peer is lost", _default(Heartbeat, "deadline")
    )
    connect_deadline: float = _setting("links", SECONDS, "seconds to connect while a pipeline opens", WARM_UP)

    tls_cert: str | None = _setting("security", File(metavar="PEM"), "this side's certificate")
    tls_key: str | None = _setting("security", File(metavar="PEM"), "its private key")
    tls_ca: str | None = _setting(
        "security", File(metavar="PEM"), "who may sign the other side's certificate"
    )
    key_file: str | None = _setting(
        "security", File(), "a key that both sides share, 16 random bytes or more"
    )
    coordinator_key_file: str | None = _setting(
        "security",
        File(),
        "a key of coordinators, the first and the last stage: who has only the other one opens no sessions",
    )
    coordinators: tuple[str, ...] | None = _setting(
        "security", Many(Text("NAME")), "names in the certificates of those who may open sessions"
    )
    lock: str | None = _setting(
        "security", File(), "accept only the stages that `meshpipe lock` has recorded"
    )

    layers: str | None = _setting("stage", Text("A:B", "15:30"), "first layer, and the one after the last")
    listen: str = _setting(
        "stage", Text("HOST:PORT"), "where to listen; port 0: any free one", "127.0.0.1:7001"
    )
    insecure: bool = _setting(
        "stage", Switch(), "listen to strangers with neither mutual TLS nor a key", False
    )
    drain_seconds: float = _setting(
        "stage", Number(0, 1e6), "after SIGTERM, seconds for the sessions that are open", 30.0
    )
    keep_rows: float = _setting(
        "stage",
        Number(0, 1e6),
        "MiB for activations that were sent on: when another stage is lost, this one need not compute them again",
        float(KEEP_ROWS),
    )
    conditions: str | None = _setting(
        "stage", Text("LIST", "delay=0.1,jitter=0.01"), "suffered by what is sent on, for experiments"
    )
    conditions_upward: str | None = _setting(
        "stage", Text("LIST", "delay=0.1,jitter=0.01"), "suffered by what is sent back up the link"
    )

    host: str = _setting("server", Text("HOST"), "where the OpenAI-compatible server listens", "127.0.0.1")
    port: int = _setting("server", Integer(0, 65535), "its port; 0: any free one", 8000)
    served_name: str | None = _setting(
        "server", Text("NAME"), "the model's name for clients", unset="the file's name"
    )
    queue: int = _setting("server", Integer(0, 100_000), "requests that may wait for a lane", 64)
    send_deadline: float = _setting(
        "server",
        Number(0.001, 86400),
        "seconds that a client may leave what was sent to it unread; then it is cut off (on Linux)",
        60.0,
    )
    api_key_file: str | None = _setting(
        "server",
        File(),
        "keys of which clients have to send one, one a line",
        unset="no key is asked for",
    )

    # ---------------------------------------------------------------- what the settings make

    def stage_engine(self) -> dict[str, Any]:
        """Keyword arguments of `StageEngine`, and so of `Pipeline.local`."""
        return {
            "lanes": self.lanes,
            "context": self.context,
            "threads": self.threads,
            "exact": self.exact,
            "mtp": self.mtp,
            "options": EngineOptions(**self._like(EngineOptions)),
        }

    def fallback(self, model: str | None) -> LocalFallback | None:
        """What serves while stages are lost. Raises UsageError if no model is known."""
        if not self.local_fallback:
            return None
        if model is None:
            raise UsageError("local_fallback needs the model: name it with --model, or in the topology file")
        return LocalFallback(model, self.threads, EngineOptions(**self._like(EngineOptions)))

    def speculation_settings(self) -> Speculation:
        """Raises UsageError for settings that contradict each other.

        A draft model that the mode has no use for is left out: a file, or the model, may name it for whoever wants it.
        """
        ngram = NgramConfig(
            **{name: getattr(self, f"ngram_{name}") for name in attrs.fields_dict(NgramConfig)}
        )
        like = self._like(Speculation)
        if self.speculation not in ("auto", "draft", "draft+ngram"):
            like["draft"] = None
        return Speculation(mode=self.speculation, ngram=ngram, **like)

    def sampling(self) -> Sampling:
        """How tokens are picked."""
        return Sampling(**self._like(Sampling))

    def links_heartbeat(self) -> Heartbeat:
        """How links find out that a peer is gone."""
        return Heartbeat(self.heartbeat, self.heartbeat_deadline)

    def security(self) -> Security:
        """With all three TLS files both sides prove who they are. Raises UsageError."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("tls_cert and tls_key go together")
        server = client = None
        if self.tls_cert is not None and self.tls_key is not None:
            server = server_context(self.tls_cert, self.tls_key, self.tls_ca)
        if self.tls_ca is not None:
            client = client_context(self.tls_ca, self.tls_cert, self.tls_key)
        if self.coordinators is not None and (server is None or self.tls_ca is None):
            raise UsageError(
                "coordinators are told by their certificates: set tls_cert, tls_key and tls_ca too"
            )
        if self.coordinator_key_file is not None and self.key_file is None:
            raise UsageError("coordinator_key_file is besides key_file, the stages' own: set both")
        return Security(
            key=shared_key(self.key_file) if self.key_file is not None else None,
            server=server,
            client=client,
            coordinator_key=(
                shared_key(self.coordinator_key_file) if self.coordinator_key_file is not None else None
            ),
            coordinators=frozenset(self.coordinators) if self.coordinators is not None else None,
        )

    def topology_lock(self) -> Lock | None:
        """What `meshpipe lock` has recorded. Raises UsageError."""
        return read_lock(self.lock) if self.lock is not None else None

    def spawn_conditions(self) -> Conditions | None:
        """What `delay_ms` puts on every link."""
        return Conditions(delay=self.delay_ms / 1000) if self.delay_ms else None

    def _like(self, of: type) -> dict[str, Any]:
        """The settings that are named as fields of an attrs class."""
        mine = attrs.fields_dict(type(self))
        return {name: getattr(self, name) for name in attrs.fields_dict(of) if name in mine}


@frozen
class Setting:
    """What is known of one setting. `unset`: what it means that it has no value."""

    name: str
    group: str
    kind: Kind
    help: str
    default: Any
    unset: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "MESHPIPE_" + self.name.upper()

    def read(self, value: object, origin: str) -> Any:
        """The value, of its kind. Raises UsageError naming setting, origin, value, and what is allowed."""
        try:
            return self.kind.read(value)
        except (ValueError, TypeError):
            raise UsageError(f"{self.name} is {value!r} ({origin}): it must be {self.kind.allowed}") from None


@cache
def settings() -> dict[str, Setting]:
    """All settings by name, in order."""
    return {
        field.name: Setting(field.name, default=field.default, **field.metadata)
        for field in attrs.fields(Configuration)
    }


def groups() -> Iterator[tuple[str, list[Setting]]]:
    """The settings by group, in order."""
    names = dict.fromkeys(setting.group for setting in settings().values())
    for name in names:
        yield name, [setting for setting in settings().values() if setting.group == name]
