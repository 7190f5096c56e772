"""Rules of this package written out with their numbers, as a person types them and a settings file keeps them.

    namm:TotalFlux(80)        namm:Periodic((2, 2))        namm:TotalFlux(total=120) + 0.5 * namm:Periodic((2, 2))

A name of ours, literals in parentheses, sums, and multiples by a number: that is all of it. The text is read as a tree
of Python and nothing in it is evaluated, so that it needs no trust, whoever wrote it. Imports no torch before a rule is
made.
"""

import ast
import inspect
import re
from typing import TYPE_CHECKING, Any

from namm.errors import NammError, UsageError
from namm.experiments.presets import require_name

if TYPE_CHECKING:
    from namm.constraints import Constraint

LONGEST = 1000
"""Characters of a rule that is written out."""
EXAMPLE = 'such as "namm:TotalFlux(80)" or "namm:TotalFlux(120) + 0.5 * namm:Periodic((2, 2))"'


def is_written_out(name: str) -> bool:
    """Whether `name` says more than where a rule is: numbers, a sum, or a multiple."""
    return any(character in name for character in "()+*")


def rule_from_text(text: str) -> "Constraint":
    """The rule that `text` writes out."""
    try:
        if len(text) > LONGEST:
            raise ValueError(f"it has more than {LONGEST} characters")
        if others := set(re.findall(r"([\w.]+):\w", text)) - {"namm"}:
            raise UsageError(
                f"{_short(text)} gives numbers to a rule of {others.pop()}; only rules of ours are written out: make "
                "an object there and name that, module:name."
            )
        tree = ast.parse(re.sub(r"\bnamm:(?=\w)", "namm.", text.strip()), mode="eval")
        return _rule(tree.body, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(f"{_short(text)} is no rule that is written out ({reason}): write it {EXAMPLE}.") from error


def _rule(node: ast.expr, text: str) -> "Constraint":
    match node:
        case ast.BinOp(left, ast.Add(), right):
            return _rule(left, text) + _rule(right, text)
        case ast.BinOp(ast.Constant(int() | float() as factor), ast.Mult(), rule):
            return factor * _rule(rule, text)
        case ast.BinOp(rule, ast.Mult(), ast.Constant(int() | float() as factor)):
            return factor * _rule(rule, text)
        case ast.Call(ast.Attribute(ast.Name("namm"), name), positional, named):
            return _made(name, positional, named)
        case ast.Attribute(ast.Name("namm"), name):
            return _made(name, [], [])
        case ast.Call(ast.Name(name)) | ast.Name(name):
            raise UsageError(f"{name} in {_short(text)} is not known: rules of ours begin with namm:, {EXAMPLE}.")
    part = ast.unparse(node).replace("namm.", "namm:")
    raise UsageError(f"{_short(part)} is neither a rule of ours, nor a sum, nor a multiple of one: write it {EXAMPLE}.")


def _made(name: str, positional: list[ast.expr], named: list[ast.keyword]) -> "Constraint":
    """The rule of that name with these literals."""
    from namm.constraints.description import RULES, STEPS

    kind = RULES[require_name(name, sorted(RULES), "rule with numbers in namm called")]
    values = [_literal(each, name) for each in positional]
    options = {each.arg or "**": _literal(each.value, name) for each in named}
    try:
        bound = inspect.signature(kind).bind(*values, **options)
    except TypeError as error:
        raise UsageError(f"namm:{name} cannot be made ({error}): it is {_signature(name)}.") from error
    if "step" in bound.arguments:
        step = str(bound.arguments["step"]).replace("-", "_")
        if step not in STEPS:
            raise UsageError(f"namm:{name} knows the steps {' and '.join(STEPS)}, not {step!r}.")
        bound.arguments["step"] = STEPS[step]
    try:
        return kind(*bound.args, **bound.kwargs)
    except NammError:
        raise
    except Exception as error:  # a number of the wrong kind, which the rule itself did not look at
        raise UsageError(f"namm:{name} cannot be made of these values ({error}): it is {_signature(name)}.") from error


def _literal(node: ast.expr, name: str) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise UsageError(
            f"{_short(ast.unparse(node))} in namm:{name} is not a literal: it takes numbers, texts and tuples of them, "
            f"as in {_signature(name)}."
        ) from error


def _signature(name: str) -> str:
    """A rule with its arguments and their defaults."""
    from namm.constraints.description import RULES

    parts = []
    for each in inspect.signature(RULES[name]).parameters.values():
        if each.default is not each.empty:
            parts.append(f"{each.name}={getattr(each.default, '__name__', repr(each.default))}")
    return f"namm:{name}({', '.join(parts)})"


def _short(text: str) -> str:
    """A text as errors show it."""
    return repr(text if len(text) <= 80 else f"{text[:79]}…")
