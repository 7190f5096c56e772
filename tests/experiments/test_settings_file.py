"""Settings to YAML and back, and what a mistake in a file is answered with."""

from dataclasses import fields, is_dataclass, replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from namm.errors import UsageError
from namm.experiments.engine import settings_file
from namm.experiments.engine.settings import with_seed
from namm.experiments.engine.settings_file import changes, digest, from_yaml, plain, read_yaml, to_yaml
from namm.experiments.engine.stages import STAGES, stage_keys, stages_until
from namm.experiments.presets import EXPERIMENTS, find, preset
from namm.training.settings import LATER

ALL = [(experiment, name) for experiment in EXPERIMENTS for name in find(experiment).presets]


@pytest.mark.parametrize(("experiment", "name"), ALL)
def test_every_preset_survives_yaml(experiment, name):
    chosen = preset(experiment, name)
    back = from_yaml(to_yaml(chosen))
    assert back == chosen
    assert stage_keys(back.settings) == stage_keys(chosen.settings)


@given(
    rate=st.floats(1e-8, 1, allow_subnormal=False),
    betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
    clip=st.none() | st.floats(1e-3, 10),
    threshold=st.none() | st.floats(0, 1),
    budget=st.sampled_from(["3 steps", "0.5 minutes", "1e3 epochs"]),
    skip=st.booleans(),
    multipliers=st.lists(st.integers(1, 8), max_size=5).map(tuple),
)
def test_changed_settings_survive_yaml(rate, betas, clip, threshold, budget, skip, multipliers):
    base = preset("periodic").settings
    train = replace(base.map.train, learning_rate=rate, betas=betas, clip=clip, budget=budget)
    changed = replace(
        base,
        data=replace(base.data, threshold=threshold),
        map=replace(base.map, train=train, f=replace(base.map.f, skip=skip)),
        mdm=replace(base.mdm, network=replace(base.mdm.network, multipliers=multipliers)),
    )
    assert from_yaml(to_yaml(replace(preset("periodic"), settings=changed))).settings == changed


def every_key(value, path=()):
    """(path, name) of every setting, at every depth."""
    for f in fields(value):
        yield path, f.name
        if is_dataclass(getattr(value, f.name)):
            yield from every_key(getattr(value, f.name), (*path, f.name))


def test_a_misspelt_key_anywhere_is_named_with_its_place_and_the_nearest():
    chosen = preset("burgers")
    found = list(every_key(chosen.settings))
    assert len(found) > 100
    for path, name in found:
        content = yaml.safe_load(to_yaml(chosen))
        place = content
        for part in path:
            place = place[part]
        misspelt = name[:-1] + "qq" if len(name) > 4 else name + "q"
        place[misspelt] = place.pop(name)
        with pytest.raises(UsageError) as caught:
            from_yaml(yaml.safe_dump(content), "my.yaml")
        message = str(caught.value)
        assert message.startswith("my.yaml: ")
        assert repr(misspelt) in message
        assert ".".join(path) in message
        assert f"Did you mean {name!r}?" in message or f" {name}" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("map: {train: {batch_size: many}}", "map.train.batch_size must be a whole number, not 'many'"),
        ("map: {train: {batch_size: 1.5}}", "map.train.batch_size must be a whole number, not 1.5"),
        ("map: {train: {batch_size: true}}", "map.train.batch_size must be a whole number, not True"),
        ("map: {train: {batch_size: 0}}", "map.train: batch_size must be at least 1, not 0"),
        ("map: {train: {learning_rate: fast}}", "map.train.learning_rate must be a number, not 'fast'"),
        ("map: {train: {learning_rate: null}}", "map.train.learning_rate must be a number, not None"),
        ("map: {train: {betas: 0.5}}", "map.train.betas must be a list of 2 values, not 0.5"),
        ("map: {train: {betas: [0.5, x]}}", r"map.train.betas\[1\] must be a number, not 'x'"),
        ("map: {train: {budget: 30 seconds}}", "map.train: the budget '30 seconds' is not"),
        ("map: {train: {budget: 30}}", "map.train.budget must be text, not 30"),
        ("map: {f: {skip: 1}}", "map.f.skip must be true or false, not 1"),
        ("map: {f: {activation: softpls}}", "map.f.activation called 'softpls'. Did you mean 'softplus'?"),
        ("map: {f: {activation: 3}}", "map.f.activation must be one of softplus, sigmoid, tanh, none, not 3"),
        ("map: {f: 3}", "map.f must be a mapping of settings, not 3"),
        ("map: {sigma_max: -1}", "map: sigma_max must be positive, not -1.0"),
        ("data: {dt: 0.1}\ndata: {dt: 0.2}", "the key 'data' is given twice"),
        ("data: {n_val: 0}", "data.n_train and data.n_val must be 1 or more"),
        ("data: {", "is not YAML"),
        ("preset: dmeo", "no preset 'dmeo'. Did you mean 'demo'?"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(text, message):
    with pytest.raises(UsageError, match=f"my.yaml.*{message}"):
        from_yaml(f"experiment: burgers\n{text}\n", "my.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("map: {}", "which experiment"),
        ("- 1", "which experiment"),
        ("", "which experiment"),
        ("experiment: burger", "no experiment 'burger'. Did you mean 'burgers'?"),
    ],
)
def test_a_file_must_name_its_experiment(text, message):
    with pytest.raises(UsageError, match=message):
        from_yaml(text)


def test_a_missing_file_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        read_yaml(tmp_path / "none.yaml")


def test_what_a_file_leaves_out_comes_from_its_preset():
    chosen = from_yaml("experiment: periodic\npreset: paper\nmap: {train: {learning_rate: 1e-5, clip: 1}}")
    paper = preset("periodic", "paper")
    assert chosen.settings.map.train.learning_rate == 1e-5  # YAML itself takes 1e-5 for text
    assert chosen.settings.map.train.clip == 1.0
    train = replace(chosen.settings.map.train, learning_rate=2e-4, clip=None)
    assert replace(chosen.settings, map=replace(chosen.settings.map, train=train)) == paper.settings


def test_whole_numbers_in_place_of_real_ones_do_not_change_a_key():
    a, b = preset("periodic").settings, preset("periodic").settings
    a = replace(a, map=replace(a.map, weights=replace(a.map.weights, constraint=5)))
    b = replace(b, map=replace(b.map, weights=replace(b.map.weights, constraint=5.0)))
    assert stage_keys(a) == stage_keys(b)
    assert digest(plain(a.map)) != digest(plain(replace(a.map, sigma_max=0.2)))


def test_changes_are_said_in_words():
    chosen = preset("periodic")
    other = replace(chosen, settings=replace(chosen.settings, map=replace(chosen.settings.map, sigma_max=0.2)))
    assert changes(to_yaml(chosen), to_yaml(other)) == "map.sigma_max: 0.3 -> 0.2"
    assert changes("{", to_yaml(other)) == "the file was written otherwise"


# Keys


def changed_stages(a, b):
    return [name for name in STAGES if stage_keys(a)[name] != stage_keys(b)[name]]


def test_a_changed_setting_changes_the_keys_of_its_stage_and_of_what_depends_on_it():
    s = preset("burgers").settings
    every = list(STAGES)
    assert changed_stages(s, s) == []
    assert changed_stages(s, replace(s, data=replace(s.data, dt=0.06))) == every
    assert changed_stages(s, replace(s, map=replace(s.map, sigma_max=0.2))) == every[1:]
    assert changed_stages(s, replace(s, samples=replace(s.samples, n=5))) == [*every[3:7], "evaluate", "report"]
    assert changed_stages(s, replace(s, vae=replace(s.vae, latent=5))) == ["mvae", "vae"]
    assert changed_stages(s, replace(s, evaluate=replace(s.evaluate, n=5))) == ["evaluate", "report"]
    own = replace(s, dm=replace(s.dm, equal_compute=False))
    longer = replace(s, dm=replace(s.dm, train=replace(s.dm.train, budget="9 steps")))
    assert changed_stages(s, longer) == []
    assert changed_stages(own, replace(longer, dm=replace(longer.dm, equal_compute=False)))[0] == "dm"
    finetuned = replace(own, finetune=replace(own.finetune, sigma_max=0.2))
    assert changed_stages(own, finetuned) == ["finetune", "repair", "evaluate", "report"]


def test_a_few_step_model_changes_the_keys_of_the_evaluation_where_there_is_one():
    s = preset("burgers").settings
    with_few = replace(s, few=replace(s.few, steps=1))
    assert changed_stages(s, with_few) == ["evaluate", "report"]
    assert changed_stages(with_few, replace(s, few=replace(s.few, steps=2))) == ["evaluate", "report"]
    assert changed_stages(with_few, replace(with_few, few=replace(with_few.few, grid=8)))[0] == "few"
    assert changed_stages(s, replace(s, few=replace(s.few, grid=8))) == ["few"]  # that nobody asks for
    assert "few_steps" not in STAGES["evaluate"].part(s)


NETWORK_0_1 = {"filters", "multipliers", "blocks", "attention", "dropout", "unshuffle"}
"""Settings of the network that version 0.1 had; its keys are hashes of them."""


@pytest.mark.parametrize("stage", ["mdm", "dm"])
def test_the_keys_of_the_first_network_stand_and_another_one_has_others(stage):
    s = preset("burgers", "paper").settings
    assert STAGES[stage].part(s)["network"].keys() == NETWORK_0_1
    for changed in ({"kind": "dit"}, {"kind": "unet"}, {"kind": "dit", "depth": 4}):
        other = replace(s, mdm=replace(s.mdm, network=replace(s.mdm.network, **changed)))
        assert STAGES[stage].part(other)["network"].keys() == NETWORK_0_1 | changed.keys()
        assert stage in changed_stages(s, other)


def test_a_file_of_the_first_network_keeps_it_whatever_its_preset_has_now(monkeypatch):
    old = preset("burgers")
    content = yaml.safe_load(to_yaml(old))
    content["mdm"]["network"] = {name: content["mdm"]["network"][name] for name in NETWORK_0_1}
    mdm = replace(old.settings.mdm, network=replace(old.settings.mdm.network, kind="dit", depth=4))
    now = replace(old, settings=replace(old.settings, mdm=mdm))
    monkeypatch.setattr(settings_file, "preset", lambda *_: now)
    assert from_yaml(yaml.safe_dump(content)).settings.mdm.network.kind == "ncsnpp"
    part = from_yaml("experiment: burgers\nmdm: {network: {filters: 8}}").settings.mdm.network
    assert (part.kind, part.filters, part.depth) == ("dit", 8, 4)  # a few lines of a person's own


@pytest.mark.parametrize("stage", ["mdm", "dm"])
def test_the_keys_of_the_papers_schedule_stand_and_straight_paths_have_others(stage):
    s = preset("burgers", "paper").settings
    known = {"beta_min", "beta_max", "t_min", "prediction"}
    assert STAGES[stage].part(s)["diffusion"].keys() == known
    for changed in ({"schedule": "straight"}, {"times": "logit-normal"}):
        other = replace(s, mdm=replace(s.mdm, diffusion=replace(s.mdm.diffusion, **changed)))
        assert STAGES[stage].part(other)["diffusion"].keys() == known | changed.keys()
        assert stage in changed_stages(s, other)


def test_a_file_without_a_schedule_keeps_the_papers_whatever_its_preset_has_now(monkeypatch):
    old = preset("burgers", "paper")
    content = yaml.safe_load(to_yaml(old))
    for name in ("schedule", "times"):
        del content["mdm"]["diffusion"][name]
    diffusion = replace(old.settings.mdm.diffusion, schedule="straight", times="logit-normal")
    now = replace(old, settings=replace(old.settings, mdm=replace(old.settings.mdm, diffusion=diffusion)))
    monkeypatch.setattr(settings_file, "preset", lambda *_: now)
    assert from_yaml(yaml.safe_dump(content)).settings == old.settings
    part = from_yaml("experiment: burgers\nmdm: {diffusion: {t_min: 0.01}}").settings.mdm.diffusion
    assert (part.schedule, part.times, part.t_min) == ("straight", "logit-normal", 0.01)


@pytest.mark.parametrize(("schedule", "prediction", "other"), [("vp", "flow", "v"), ("straight", "v", "flow")])
def test_a_prediction_of_another_schedule_is_refused(schedule, prediction, other):
    text = f"experiment: burgers\nmdm: {{diffusion: {{schedule: {schedule}, prediction: {prediction}}}}}"
    with pytest.raises(UsageError, match=f"with schedule {schedule} take prediction {other} or epsilon"):
        from_yaml(text)


LATER_CHANGES = [{"optimiser": "adamw"}, {"optimiser": "muon", "weight_decay": 0.1}, {"averages": (0.5, 0.9)}]


@pytest.mark.parametrize("stage", ["map", "mdm", "finetune", "dm", "repair", "vae", "mvae"])
@pytest.mark.parametrize("changed", LATER_CHANGES)
def test_the_keys_of_trainings_by_adam_stand_and_others_have_others(stage, changed):
    s = preset("burgers").settings
    name = {"repair": "finetune", "mvae": "vae"}.get(stage, stage)
    trainings = [STAGES[stage].part(each) for each in (s, with_training(s, name, changed))]
    kept, other = (each["finetune"]["train"] if stage == "repair" else each["train"] for each in trainings)
    assert not kept.keys() & LATER.keys()
    assert other == kept | plain_values(changed)
    assert stage in changed_stages(s, with_training(s, name, changed))


def with_training(settings, name, changed):
    part = getattr(settings, name)
    return replace(settings, **{name: replace(part, train=replace(part.train, **changed))})


def plain_values(values):
    return {name: plain(value) for name, value in values.items()}


def test_a_file_without_an_optimiser_means_adam_whatever_its_preset_has_now(monkeypatch):
    old = preset("burgers")
    content = yaml.safe_load(to_yaml(old))
    for part in ("map", "mdm", "finetune", "dm", "vae"):
        for name in LATER:
            del content[part]["train"][name]
    now = old.settings
    for name in ("map", "mdm"):
        now = with_training(now, name, {"optimiser": "muon", "averages": (0.5,)})
    monkeypatch.setattr(settings_file, "preset", lambda *_: replace(old, settings=now))
    assert from_yaml(yaml.safe_dump(content)).settings == old.settings
    part = from_yaml("experiment: burgers\nmdm: {train: {batch_size: 8}}").settings.mdm.train
    assert (part.optimiser, part.batch_size) == ("muon", 8)  # a few lines of a person's own


def test_a_stage_is_reached_through_what_it_needs_and_nothing_else():
    s = preset("burgers").settings
    names = list(STAGES)

    def until(last, settings=s):
        return [stage.name for stage in stages_until(last, settings)]

    assert until("map") == ["data", "map"]
    assert until("finetune") == names[:5]
    assert until("evaluate") == [*names[:7], "evaluate"]
    assert until("evaluate", replace(s, dm=replace(s.dm, repair=False))) == [*names[:6], "evaluate"]
    assert until("vae") == ["data", "map", "mvae", "vae"]
    assert until("dm") == names[:6]
    assert until("dm", replace(s, dm=replace(s.dm, equal_compute=False))) == ["data", "dm"]
    with pytest.raises(UsageError, match="Did you mean 'map'"):
        until("mapp")


def test_a_whole_run_ends_with_its_report():
    names = [stage.name for stage in stages_until(None, preset("burgers").settings)]
    assert names == [stage.name for stage in stages_until("report", preset("burgers").settings)]
    assert names[-2:] == ["evaluate", "report"]


def test_a_counter_of_other_content_is_another_rule(tmp_path):
    path = tmp_path / "counter.safetensors"
    s = preset("count").settings
    s = replace(s, data=replace(s.data, counter=str(path)))
    path.write_bytes(b"one")
    before = stage_keys(s)
    assert stage_keys(s) == before
    path.write_bytes(b"two")
    assert all(stage_keys(s)[name] != key for name, key in before.items())


@pytest.mark.parametrize("wrong", [{"n": 0}, {"subset": 1}, {"mmd_subsets": 0}, {"kid_subsets": -1}, {"n_fid": -1}])
def test_an_evaluation_of_nothing_is_refused(wrong):
    with pytest.raises(UsageError, match="evaluate: "):
        replace(preset("burgers").settings.evaluate, **wrong)


def test_every_seed_follows_one():
    s = preset("burgers").settings
    assert with_seed(s, 0) == s
    seeds = [
        {t.data.seed, t.samples.seed + 100, t.evaluate.seed + 100, t.map.train.seed, t.dm.train.seed}
        for t in (with_seed(s, k) for k in range(4))
    ]
    assert all(len(own) == 3 for own in seeds)  # one of data and trainings, one of either set of samples
    assert len(set().union(*({x for x in own if x >= 100} for own in seeds))) == 8
