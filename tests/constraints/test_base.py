"""The base class: algebra, precision, functions as constraints, and the page that documents them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from namm.constraints import Constraint, Periodic, TotalFlux, constraint
from namm.errors import ConstraintError, DataError, UsageError

scales = st.floats(1e-3, 1e3)
seeds = st.integers(0, 2**31)


def images(seed: int = 0, n: int = 3, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(n, 2, 4, 6, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Brightest(Constraint):
    """Neither residual nor projection."""

    def distance(self, x):
        return x.flatten(1).amax(1).abs()


def test_distance_is_abstract():
    with pytest.raises(TypeError, match="distance"):
        Constraint()


@given(scales, scales, seeds)
def test_sums_and_scales_are_linear(c, d, seed):
    x = images(seed)
    total = x.numpy().sum((1, 2, 3))
    rule = c * TotalFlux(5.0) + TotalFlux(-1.0) * d
    expected = c * abs(total - 5.0) + d * abs(total + 1.0)
    assert torch.allclose(rule(x), torch.from_numpy(expected), rtol=1e-12)


@given(scales, scales, seeds)
def test_nesting_does_not_change_the_value(c, d, seed):
    x, a, b, e = images(seed), TotalFlux(5.0), Periodic((2, 3)), Brightest()
    left, right = (a + b) + e, a + (b + e)
    assert torch.equal(left(x), right(x))
    assert torch.allclose((c * (d * a))(x), (c * d) * a(x), rtol=1e-12)
    assert torch.allclose((c * left)(x), c * a(x) + c * b(x) + c * e(x), rtol=1e-12)


def test_repr_is_flat_and_reads_like_the_formula():
    a, b = TotalFlux(5.0), Periodic((2, 3))
    assert repr(2 * (3 * a) + (b + a)) == ("6 * TotalFlux(total=5.0) + Periodic(tiles=(2, 3)) + TotalFlux(total=5.0)")
    assert repr(0.5 * (a + b)) == "0.5 * (TotalFlux(total=5.0) + Periodic(tiles=(2, 3)))"
    assert (2 * a + b).name == "2 * TotalFlux + Periodic"


def test_builtin_sum_adds_constraints():
    x, rules = images(), [TotalFlux(5.0), Periodic((2, 3)), Brightest()]
    assert torch.equal(sum(rules)(x), (rules[0] + rules[1] + rules[2])(x))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), "2", True, None])
def test_scale_must_be_a_positive_number(scale):
    with pytest.raises(UsageError, match="TotalFlux can be scaled by a finite number > 0 only, got"):
        TotalFlux() * scale


def test_adding_a_number_is_a_type_error():
    with pytest.raises(TypeError):
        TotalFlux() + 1.0


def test_optional_methods_are_refused_by_name():
    x, rule = images(), Brightest()
    with pytest.raises(ConstraintError, match="Brightest defines no residual"):
        rule.residual(x)
    with pytest.raises(ConstraintError, match="Brightest defines no project"):
        (2.0 * rule).project(x)
    with pytest.raises(ConstraintError, match=r"TotalFlux \+ Periodic defines no project"):
        (TotalFlux() + Periodic()).project(x)


def test_wrappers_report_what_the_wrapped_constraint_has():
    flux, none = TotalFlux(), Brightest()
    assert [(r.has_residual, r.has_project) for r in (flux, none, 2 * flux, 2 * none, flux + flux, flux + none)] == [
        (True, True),
        (False, False),
        (True, True),
        (False, False),
        (True, False),
        (False, False),
    ]


def test_scaling_keeps_residual_and_projection():
    x, rule = images(), TotalFlux(5.0)
    assert torch.equal((3.0 * rule).residual(x), rule.residual(x))
    assert torch.equal((3.0 * rule).project(x), rule.project(x))


def test_the_residual_of_a_sum_holds_every_part():
    x = images()
    flux, periodic = TotalFlux(5.0), Periodic((2, 3))
    parts = [flux.residual(x).reshape(3, 1), periodic.residual(x).reshape(3, 48)]
    assert torch.equal((flux + periodic).residual(x), torch.cat(parts, 1))


RULES = [
    TotalFlux(5.0),
    Periodic((2, 3)),
    TotalFlux(5.0) + 2.0 * Periodic((2, 3)),
    constraint(Brightest().distance),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_compiles_into_one_graph(rule):
    x = images(dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(rule, fullgraph=True, backend="aot_eager")
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    value, expected = compiled(a), rule(b)
    assert torch.allclose(value, expected, rtol=1e-6)
    value.sum().backward()
    expected.sum().backward()
    assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-7)


def test_autocast_does_not_reach_the_distance():
    weight = torch.randn(48, 48)
    rule = constraint(lambda x: (x.flatten(1) @ weight).abs().mean(1))
    x = images(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x.flatten(1) @ weight).dtype == torch.bfloat16
        value = rule(x)
    assert value.dtype == torch.float32
    assert torch.equal(value, rule(x))


@pytest.mark.parametrize(("given_dtype", "used"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_distances_are_float32_or_better(given_dtype, used):
    seen = []
    rule = constraint(lambda x: seen.append(x.dtype) or x.abs().mean((1, 2, 3)))
    assert rule(images().to(given_dtype)).dtype == used
    assert seen == [used]


def test_a_call_refuses_wrong_input_and_output_at_once():
    with pytest.raises(DataError, match=r"TotalFlux needs images of shape \(B, C, H, W\), got shape \(2, 4, 6\)"):
        TotalFlux()(images()[0])
    with pytest.raises(DataError, match=r"floating-point images, got torch\.int64"):
        TotalFlux()(images().long())
    with pytest.raises(ConstraintError, match=r"returned shape \(3, 1\) for 3 images, expected \(3,\)"):
        constraint(lambda x: x.flatten(1).mean(1, keepdim=True))(images())


def test_function_keeps_its_name_and_documentation():
    @constraint
    def dark_corner(x):
        """The first pixel is black."""
        return x[:, 0, 0, 0].abs()

    x = images()
    assert (dark_corner.name, dark_corner.__name__, repr(dark_corner)) == (
        "dark_corner",
        "dark_corner",
        "constraint(dark_corner)",
    )
    assert dark_corner.__doc__ == "The first pixel is black."
    assert torch.equal(dark_corner(x), x[:, 0, 0, 0].abs())
    assert not dark_corner.has_residual
    assert not dark_corner.has_project
    with pytest.raises(ConstraintError, match="dark_corner defines no residual"):
        dark_corner.residual(x)


def test_decorator_with_arguments():
    @constraint(name="zero mean", residual=lambda x: x.mean((1, 2, 3)), project=lambda x: x - x.mean((1, 2, 3), True))
    def rule(x):
        return x.mean((1, 2, 3)).abs()

    x = images()
    assert rule.name == "zero mean"
    assert rule.has_residual
    assert rule.has_project
    assert torch.equal(rule.residual(x), x.mean((1, 2, 3)))
    assert rule(rule.project(x)).max() < 1e-15


def test_a_network_becomes_part_of_the_constraint():
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 1), torch.nn.Flatten(0))
    rule = constraint(network)
    assert rule.name == "Sequential"
    assert {id(p) for p in rule.parameters()} == {id(p) for p in network.parameters()}


def test_constraint_needs_a_function():
    with pytest.raises(UsageError, match="constraint needs a function"):
        constraint(3.0)


# Where a rule computes. There is no second device here: fake tensors have devices, shapes and errors, but no values.


class Template(Constraint):
    """Holds a buffer; so does what is composed of it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("image", torch.zeros(2, 4, 6))

    def distance(self, x):
        return self.residual(x).abs().mean((1, 2, 3))

    def residual(self, x):
        return x - self.image


@pytest.mark.parametrize("compose", [lambda rule: rule, lambda rule: 2.0 * rule, lambda rule: TotalFlux(1.0) + rule])
def test_a_rule_moves_to_its_images(compose):
    with FakeTensorMode():
        template = Template()
        rule, x = compose(template), torch.zeros(3, 2, 4, 6, device="cuda")
        assert rule(x).device == x.device
        assert template.image.device == x.device
        assert rule(torch.zeros(3, 2, 4, 6)).device.type == "cpu"
        assert template.image.device.type == "cpu"
        if rule.has_residual:
            assert rule.follow(x).residual(x).device == x.device


def test_a_rule_that_is_where_its_images_are_is_left_alone(monkeypatch):
    moves = []
    monkeypatch.setattr(Template, "to", lambda self, *where: moves.append(where))
    x = images(dtype=torch.float32)
    torch.testing.assert_close(Template()(x), x.abs().mean((1, 2, 3)))
    assert moves == []


def test_a_tensor_that_cannot_follow_is_explained():
    with FakeTensorMode():
        left_behind, x = torch.zeros(2, 4, 6), torch.zeros(3, 2, 4, 6, device="cuda")
        rule = constraint(lambda x: (x - left_behind).abs().mean((1, 2, 3)), name="template")
        with pytest.raises(
            ConstraintError, match=r"template computes with a tensor that is not on cuda.*register_buffer"
        ):
            rule(x)


def test_another_error_of_the_rule_is_not_taken_for_that():
    network = torch.nn.Conv2d(2, 1, 3)
    with pytest.raises(RuntimeError, match="should be the same"):  # float64 images, float32 weights
        constraint(lambda x: network(x).mean((1, 2, 3)))(images())


def test_a_rule_compiles_as_one_graph():
    rule, x = Template(), images(dtype=torch.float32)
    compiled = torch.compile(rule, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), rule(x))
