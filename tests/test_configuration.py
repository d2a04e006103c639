"""Settings: one schema for files, environment and flags; who overrides whom; errors that name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpipe.cli import main
from meshpipe.cli.arguments import configured, flags_of
from meshpipe.cli.commands import parser
from meshpipe.cli.config import as_toml
from meshpipe.cli.pipelines import pipeline_of
from meshpipe.configuration import configure, groups, settings
from meshpipe.configuration.kinds import Choice, Integer, Kind, Many, Number, Switch, Text
from meshpipe.configuration.sources import read_settings
from meshpipe.errors import UsageError
from meshpipe.llama.options import EngineOptions
from meshpipe.messages import Sampling
from meshpipe.speculation.ngram import NgramConfig
from meshpipe.speculation.settings import Speculation
from meshpipe.wire.link import Heartbeat

ELSEWHERE = {
    "ngram", "mode",  # which the settings name otherwise
    "grammar", "logit_bias", "logprobs",  # what one request wants, and no operator
}  # fmt: skip


def names(of: type, prefix: str = "") -> set[str]:
    return {prefix + field.name for field in attrs.fields(of)} - ELSEWHERE


def test_no_field_of_the_classes_behind_it_is_missing() -> None:
    assert names(EngineOptions) | names(Speculation) | names(Sampling) <= set(settings())
    assert names(NgramConfig, "ngram_") <= set(settings())


def test_defaults_are_those_of_the_classes_behind_it() -> None:
    default = configure(environment={}).settings
    assert default.stage_engine() == {
        "lanes": 1,
        "context": 4096,
        "threads": 1,
        "exact": True,
        "mtp": True,
        "options": EngineOptions(),
    }
    assert default.speculation_settings() == Speculation()
    assert default.sampling() == Sampling()
    assert default.links_heartbeat() == Heartbeat()


def values_of(kind: Kind) -> st.SearchStrategy[Any]:
    """Values that a kind allows, as they are once read."""
    if isinstance(kind, Integer):
        numbers: st.SearchStrategy[Any] = st.integers(kind.low, kind.high)
        return numbers | st.just("auto") if kind.auto else numbers
    if isinstance(kind, Number):
        low = None if kind.low == -float("inf") else kind.low
        return st.floats(
            low, None if kind.high == float("inf") else kind.high, allow_infinity=False, allow_nan=False
        )
    if isinstance(kind, Choice):
        return st.sampled_from(kind.options)
    if isinstance(kind, Switch):
        return st.booleans()
    if isinstance(kind, Many):
        return st.lists(values_of(kind.of), min_size=1, max_size=3).map(tuple)
    assert isinstance(kind, Text)
    return st.text(
        st.characters(codec="utf-8", exclude_characters=",\n\r\x00", exclude_categories=["C"]), min_size=1
    )


def written(value: Any) -> str:
    """As one writes it in the environment."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@given(st.data())
def test_every_setting_reads_the_same_from_everywhere(data: st.DataObject) -> None:
    setting = data.draw(
        st.sampled_from([s for s in settings().values() if s.name not in ("model", "topology")])
    )
    value = data.draw(values_of(setting.kind))
    by_variable = configure(environment={setting.variable: written(value)})
    by_flag = configure({setting.name: written(value)}, environment={})
    typed = configure({setting.name: value}, environment={})
    for found in (by_variable, by_flag, typed):
        assert getattr(found.settings, setting.name) == value
        assert found.given(setting.name)
    assert by_variable.origins[setting.name] == setting.variable
    assert by_flag.origins[setting.name] == setting.flag


@given(st.data())
def test_a_child_is_told_what_the_parent_knows(data: st.DataObject) -> None:
    """Settings turned into the flags of `meshpipe stage` and back."""
    of_stage = [s for s in settings().values() if s.group in ("engine", "links")]
    chosen = data.draw(st.lists(st.sampled_from(of_stage), unique_by=lambda s: s.name))
    parent = configure({s.name: data.draw(values_of(s.kind)) for s in chosen}, environment={})
    flags = flags_of(parent, "engine", "links")
    child = configured(parser().parse_args(["stage", *flags])).settings
    for setting in of_stage:
        assert getattr(child, setting.name) == getattr(parent.settings, setting.name)


def test_flags_override_the_environment_that_a_file_and_that_the_model(tmp_path: Path) -> None:
    model = tmp_path / "M.gguf"
    (tmp_path / "M.meshpipe.toml").write_text('depth = 2\nwidth = 2\nmax_width = 4\nspeculation = "ngram"\n')
    file = tmp_path / "settings.toml"
    file.write_text(f'model = "{model}"\ndepth = 3\nwidth = 3\nmax_width = 8\n')
    found = configure({"depth": "5"}, file=file, environment={"MESHPIPE_WIDTH": "4", "MESHPIPE_DEPTH": "4"})
    chosen = found.settings
    assert (chosen.depth, chosen.width, chosen.max_width, chosen.speculation) == (5, 4, 8, "ngram")
    assert chosen.ngram_min_match == NgramConfig().min_match
    origin = found.origins
    assert [origin[name] for name in ("depth", "width", "max_width", "speculation", "lanes")] == [
        "--depth",
        "MESHPIPE_WIDTH",
        str(file),
        str(tmp_path / "M.meshpipe.toml"),
        "default",
    ]


def test_paths_in_a_file_begin_at_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('model = "M.gguf"\nkey_file = "/etc/mesh.key"\n')
    chosen = configure(file=file, environment={"MESHPIPE_TLS_CA": "ca.pem"}).settings
    assert (chosen.model, chosen.key_file, chosen.tls_ca) == (
        str(tmp_path / "M.gguf"),
        "/etc/mesh.key",
        "ca.pem",
    )
    file.write_text("model = 5\n")
    with pytest.raises(UsageError, match="model is 5"):
        configure(file=file, environment={})


def test_a_model_decides_about_speculation_only(tmp_path: Path) -> None:
    (tmp_path / "M.meshpipe.toml").write_text("insecure = true\n")
    with pytest.raises(
        UsageError, match=r"M\.meshpipe\.toml: insecure may not be set here; allowed: speculation, "
    ):
        configure({"model": str(tmp_path / "M.gguf")}, environment={})


def test_a_draft_model_that_a_model_recommends_lies_beside_it_and_may_be_declined(tmp_path: Path) -> None:
    (tmp_path / "M.meshpipe.toml").write_text('speculation = "draft"\ndraft = "small.gguf"\n')
    model = str(tmp_path / "M.gguf")
    taken = configure({"model": model}, environment={}).settings.speculation_settings()
    assert (taken.mode, taken.draft) == ("draft", str(tmp_path / "small.gguf"))
    for mode in ("ngram", "off"):
        declined = configure({"model": model, "speculation": mode}, environment={}).settings
        assert declined.speculation_settings() == Speculation(mode=mode)
    with pytest.raises(UsageError, match="needs a draft model"):
        configure({"speculation": "draft"}, environment={}).settings.speculation_settings()


def test_the_model_of_a_topology_recommends_too(tmp_path: Path) -> None:
    (tmp_path / "M.meshpipe.toml").write_text("depth = 7\n")
    (tmp_path / "mesh.toml").write_text('model = "M.gguf"\n[[stages]]\naddress = "127.0.0.1:1"\n')
    assert configure({"topology": str(tmp_path / "mesh.toml")}, environment={}).settings.depth == 7


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("lanes", "many", "lanes is 'many' (MESHPIPE_LANES): it must be an integer from 1 to 255"),
        ("depth", "0", "depth is '0' (MESHPIPE_DEPTH): it must be auto or an integer from 1 to 256"),
        ("speculation", "telepathy", "it must be one of auto, "),
        ("exact", "perhaps", "exact is 'perhaps' (MESHPIPE_EXACT): it must be true or false"),
        ("temperature", "nan", "it must be a number from 0 to 100"),
        ("heartbeat", "0", "it must be a number from 0.001 to"),
        ("delay_ms", "-5", "it must be a number from 0 to"),
        ("n_gpu_layers", "99999999999", "it must be an integer from -1 to 2147483647"),
        ("tensor_split", "1,x", "it must be a list of which each is a number of 0 or more"),
    ],
)
def test_an_error_names_setting_origin_value_and_what_is_allowed(name: str, value: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        configure(environment={settings()[name].variable: value})
    assert said in str(caught.value)


def test_a_name_that_is_none_is_told_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("laness = 2\n")
    with pytest.raises(UsageError, match=r"settings\.toml: laness is no setting; did you mean lanes\?"):
        configure(file=file, environment={})
    with pytest.raises(
        UsageError, match="MESHPIPE_LANE in the environment is no setting; did you mean MESHPIPE_LANES"
    ):
        configure(environment={"MESHPIPE_LANE": "2"})
    with pytest.raises(UsageError, match="cannot read the configuration"):
        configure(environment={"MESHPIPE_CONFIG": str(tmp_path / "none.toml")})
    file.write_text("lanes = ")
    with pytest.raises(UsageError, match="is not valid TOML"):
        configure(file=file, environment={})


def test_what_is_empty_in_the_environment_is_not_set() -> None:
    assert not configure(environment={"MESHPIPE_LANES": ""}).given("lanes")


def test_config_prints_a_file_that_says_the_same(tmp_path: Path) -> None:
    found = configure({"devices": "a,b", "depth": "6", "exact": False, "top_p": "0.5"}, environment={})
    file = tmp_path / "printed.toml"
    file.write_text(as_toml(found))
    assert configure(file=file, environment={}).settings == found.settings
    assert set(read_settings(file)) == {
        name for name in settings() if getattr(found.settings, name) is not None
    }


def test_config_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHPIPE_LANES", "8")
    assert main(["config", "--depth", "12", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert set(said) == set(settings())
    assert (said["lanes"]["value"], said["lanes"]["origin"]) == (8, "MESHPIPE_LANES")
    assert (said["depth"]["value"], said["depth"]["origin"]) == (12, "--depth")
    assert said["cache_type_k"]["allowed"].startswith("one of f32, f16")
    assert main(["config", "--ngram-min-n", "4", "--ngram-max-n", "2"]) == 2
    assert "min_n 4 is above max_n 2" in capsys.readouterr().err
    assert main(["config", "--config", "none.toml"]) == 2
    assert "cannot read the configuration none.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, "name the model with --model, or the stages with --topology"),
        ({"model": "M.gguf", "delay_ms": "5"}, "delay_ms (from --delay-ms) concerns links: use --spawn"),
        ({"model": "M.gguf", "local_fallback": True}, "(from --local-fallback) is for stages elsewhere"),
        ({"topology": "T", "spawn": True}, "leave out spawn (from --spawn)"),
        ({"topology": "T", "split": "2"}, "leave out split (from --split)"),
        ({"topology": "T", "threads": "2"}, "--threads is for the machines of the stages"),
        ({"model": "M.gguf", "spawn": True, "tls_cert": "a.pem"}, "tls_cert and tls_key go together"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path: Path, flags: dict[str, object], said: str) -> None:
    (tmp_path / "T").write_text('[[stages]]\naddress = "127.0.0.1:1"\n')
    if "topology" in flags:
        flags = flags | {"topology": str(tmp_path / "T")}
    with pytest.raises(UsageError) as caught:
        pipeline_of(configure(flags, environment={}))
    assert said in str(caught.value)


def test_documentation_lists_every_setting() -> None:
    page = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text()
    for group, members in groups():
        assert f"### {group}\n\n{table(members)}" in page, (
            f"run: python -m tests.test_configuration > the tables of {group}"
        )


def table(members: list[Any]) -> str:
    lines = ["| name | default | what | allowed |", "|---|---|---|---|"]
    for setting in members:
        default = setting.unset if setting.default is None else f"`{json.dumps(setting.default)}`"
        lines.append(f"| `{setting.name}` | {default} | {setting.help} | {setting.kind.allowed} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print("\n".join(f"### {group}\n\n{table(members)}" for group, members in groups()))
