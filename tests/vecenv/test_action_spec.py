"""Action specs are validated, and can be written and read."""

from __future__ import annotations

import msgspec
import pytest

from esper.vecenv import ActionSpec, Continuous, Discrete, Relevance


def test_a_mask_of_a_dependent_head_has_a_row_for_each_choice_of_its_parent():
    spec = ActionSpec((Discrete("op", 3), Discrete("slot", 4, parent="op")))
    assert [spec.mask_shape(head) for head in spec.discrete] == [(3,), (3, 4)]


def test_a_head_with_own_logits_has_a_row_of_them_for_each_choice_of_its_parent():
    spec = ActionSpec((Discrete("op", 3), Discrete("slot", 4, parent="op"), Discrete("part", 2, parent="slot", has_own_logits=True)))
    assert [spec.logits_shape(head) for head in spec.discrete] == [(3,), (4,), (4, 2)]


def test_heads_are_told_apart_by_kind_and_keep_their_order():
    spec = ActionSpec((Continuous("aim", 2), Discrete("fire", 2), Continuous("move", 3)))
    assert [head.name for head in spec.discrete] == ["fire"]
    assert [head.name for head in spec.continuous] == ["aim", "move"]


def test_a_spec_survives_being_written_and_read():
    heads = (Discrete("op", 3), Discrete("slot", 4, parent="op", has_own_logits=True), Continuous("aim", 2))
    spec = ActionSpec(heads, (Relevance("aim", given="op", choices=(1, 2)),))
    assert msgspec.json.decode(msgspec.json.encode(spec), type=ActionSpec) == spec


@pytest.mark.parametrize(
    ("heads", "relevance", "complaint"),
    [
        ((), (), "at least one head"),
        ((Discrete("a", 2), Discrete("a", 3)), (), "must differ"),
        ((Discrete("a", 0),), (), "size of at least 1; got 0"),
        ((Discrete("a", 2, parent="b"), Discrete("b", 2)), (), "'b', which is no discrete head listed before it"),
        ((Continuous("b", 2), Discrete("a", 2, parent="b")), (), "no discrete head listed before it"),
        ((Discrete("a", 2, has_own_logits=True),), (), "'a' has logits of its own .* but no parent"),
        ((Discrete("a", 2), Discrete("b", 2)), (Relevance("b", given="c", choices=(0,)),), "the heads are"),
        ((Discrete("a", 2), Discrete("b", 2)), (Relevance("a", given="b", choices=(0,)),), "listed before it"),
        ((Discrete("a", 2), Discrete("b", 2)), (Relevance("b", given="a", choices=(2,)),), r"0..1; got \(2,\)"),
        ((Discrete("a", 2), Discrete("b", 2)), (Relevance("b", given="a", choices=()),), "choices of 'a'"),
        ((Discrete("a", 2), Discrete("b", 2)), (Relevance("b", "a", (0,)), Relevance("b", "a", (1,))), "given twice"),
    ],
)
def test_an_inconsistent_spec_is_refused_with_the_reason(heads, relevance, complaint):
    with pytest.raises(ValueError, match=complaint):
        ActionSpec(heads, relevance)
