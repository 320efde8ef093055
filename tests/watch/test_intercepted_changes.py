"""Models that change between passes: an intercepted pass notices, follows the rest in full, or says what it may have missed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attemper
import zoo
from attemper.watch.attach import plan
from watched import Block, compare, same_record, stack, steps

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

hidden_softmax = torch.softmax  # taken before anything is attached


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.packed = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.packed(x).chunk(3, -1)
        return x + (q @ k.mT / 4).softmax(-1) @ v


class Switching(nn.Module):
    """A layer whose way to attend can be switched."""

    def __init__(self, **ways):
        super().__init__()
        self.packed, self.ways, self.way = nn.Linear(16, 48), ways, "none"

    def forward(self, x):
        q, k, v = (part[:, None] for part in self.packed(x).chunk(3, -1))
        return x + (v if self.way == "none" else self.ways[self.way](q, k, v))[:, 0]


def by_hand(q, k, v):
    return (q @ k.mT / 4).softmax(-1) @ v


def replaced(model, step):
    if step == 3:
        model[1] = Block()


def by_hand_in_a_new_module(model, step):
    if step == 3:
        model.append(ByHand())


def skipped(model, step):
    model[1].forward = (lambda x: x) if step == 3 else type(model[1]).forward.__get__(model[1])


def twice(model, step):
    if step == 3:
        model.append(model[0])


def reordered(model, step):
    if step == 3:
        first, second = model[0], model[1]
        model[0], model[1] = second, first


def frozen(model, step):
    model.requires_grad_(step != 3)
    model[0].packed.requires_grad_()


def in_evaluation(model, step):
    model.train(step < 3)


CHANGES = {
    change.__name__: change for change in (replaced, by_hand_in_a_new_module, twice, reordered, frozen, in_evaluation)
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_model_that_changes(change, kinds):
    found = compare(stack, lambda model, watch: steps(model, watch, change), kinds, passes="all")
    assert found[:3] == ["full", "intercepted", "intercepted"]
    # a new order shows only at the end of the pass; other changes show before anything is computed
    expected = {
        reordered: ["intercepted", "full", "intercepted"],
        by_hand_in_a_new_module: ["converted", "full", "full"],
        frozen: ["intercepted", "intercepted", "intercepted"],
        in_evaluation: ["full", "intercepted", "intercepted"],  # a pass of another kind
    }
    assert found[3:] == expected.get(change, ["converted", "full", "intercepted"])


def test_a_skipped_layer_is_no_loss(kinds):
    class Skipping(nn.Sequential):
        skips = False

        def forward(self, x):
            for index, layer in enumerate(self):
                x = x if index and self.skips else layer(x)
            return x

    def change(model, step):
        model.skips = step == 3

    found = compare(lambda: Skipping(Block(), Block()), lambda m, w: steps(m, w, change, 7), kinds)
    # the next pass is a full one; it learns of the second layer again
    assert found == ["full", "intercepted", "intercepted", "intercepted", "full", "intercepted", "intercepted"]


def test_a_layer_that_stops_attending_is_reported(kinds):
    torch.manual_seed(0)
    model = stack()
    with (
        pytest.warns(UserWarning, match=r"1: step 3: it ran with fewer attention calls than in the last full pass"),
        attemper.watch(model) as watch,
    ):
        steps(model, watch, skipped)
    assert kinds == ["full", "intercepted", "intercepted", "intercepted", "full", "intercepted"]
    assert [row["layer"] for row in watch.record.filter(steps=3).to_dicts()] == ["0", "0"]


WAYS = {
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "attemper": lambda q, k, v: attemper.attention(q, k, v).output,
    "one tensor": lambda q, k, v: F.scaled_dot_product_attention(q, q, v),
    "with dropout": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=1e-9),
    "other shape": lambda q, k, v: F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0])[:, None],
}


@pytest.mark.parametrize(
    ("before", "name"), [("none", "sdpa"), *((b, n) for b in ("none", "sdpa") for n in WAYS if n != "sdpa")]
)
def test_attention_that_begins_at_a_step_in_a_layer_that_ran_before(name, before, kinds):
    def make():
        return nn.Sequential(Block(), Switching(**WAYS))

    def change(model, step):
        model[1].way = before if step < 3 else name

    found = compare(make, lambda model, watch: steps(model, watch, change), kinds)
    assert found[:3] == ["full", "intercepted", "intercepted"]
    intercepted = before != "none" and name == "one tensor"  # the same call with other arguments
    assert found[3] == ("intercepted" if intercepted else "converted")


def test_a_call_that_moves_into_a_module_which_ran_without_one(kinds):
    class Delegating(nn.Module):
        """Attends itself or through its child; the child runs either way."""

        def __init__(self):
            super().__init__()
            self.child = Switching(**WAYS)

        def forward(self, x):
            y = self.child(x)
            return y if self.child.way == "sdpa" else y + WAYS["sdpa"](x[:, None], x[:, None], y[:, None])[:, 0]

    def change(model, step):
        model[1].child.way = "none" if step < 3 else "sdpa"

    found = compare(lambda: nn.Sequential(Block(), Delegating()), lambda m, w: steps(m, w, change), kinds)
    assert found == ["full", "intercepted", "intercepted", "converted", "full", "intercepted"]


SOFTMAXES = {
    "method": lambda z: z.softmax(-1),
    "torch": lambda z: torch.softmax(z, -1),
    "functional": lambda z: F.softmax(z, -1),
    "special": lambda z: torch.special.softmax(z, -1),
}


@pytest.mark.parametrize("softmax", SOFTMAXES.values(), ids=SOFTMAXES)
def test_attention_by_hand_that_begins_at_a_step_is_reported(softmax, kinds):
    def change(model, step):
        model[1].way = "none" if step < 3 else "by hand"

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Switching(**{"by hand": lambda q, k, v: softmax(q @ k.mT / 4) @ v}))
    with (
        pytest.warns(UserWarning, match=r"1: step 3: a softmax ran here that no full pass had seen"),
        attemper.watch(model) as watch,
    ):
        steps(model, watch, change)
    assert kinds == ["full", "intercepted", "intercepted", "converted", "full", "full"]
    assert [step for step in range(6) if "1" in watch.record.filter(steps=step).layers] == [4, 5]


def test_what_intercepted_passes_cannot_see_is_found_by_the_next_check(kinds, monkeypatch):
    monkeypatch.setattr(plan, "CHECK_AFTER", 4)

    def change(model, step):
        model[1].way = "none" if step < 3 else "hidden"

    model = nn.Sequential(Block(), Switching(hidden=lambda q, k, v: hidden_softmax(q @ k.mT, -1) @ v))
    with (
        pytest.warns(
            UserWarning, match=r"1: step 4: a full pass found attention calls that intercepted passes do not see"
        ),
        attemper.watch(model) as watch,
    ):
        steps(model, watch, change)
    assert kinds == ["full", "intercepted", "intercepted", "intercepted", "full", "full"]
    assert any("full=True follows every pass" in note for note in watch.record.notes)


def test_full_passes_come_at_growing_intervals(kinds, monkeypatch):
    monkeypatch.setattr(plan, "CHECK_AFTER", 5)
    monkeypatch.setattr(plan, "MOST_UNCHECKED", 20)
    model, x = stack(), torch.randn(1, 5, 16)
    with attemper.watch(model):
        for _ in range(57):
            model(x)
    # after 5 passes, then 10, and from then on 20
    assert [index for index, kind in enumerate(kinds) if kind == "full"] == [0, 5, 15, 35, 55]


def test_an_alias_is_never_intercepted(kinds):
    attend = F.scaled_dot_product_attention

    def make():
        return nn.Sequential(Block(), Switching(alias=attend))

    def change(model, step):
        model[1].way = "alias"

    assert set(compare(make, lambda model, watch: steps(model, watch, change), kinds)) == {"full"}


def test_eager_and_back(kinds):
    def change(subject, step):
        subject.model.set_attn_implementation("eager" if step == 3 else "sdpa")

    records = []
    for full in (True, False):
        kinds.clear()
        subject = zoo.make("llama")
        with attemper.watch(subject.model, full=full) as watch:
            for step in range(6):
                change(subject, step)
                with torch.no_grad():
                    subject.run()
                watch.step()
        records.append(watch.record)
    same_record(*records)
    assert kinds == ["full", "intercepted", "intercepted", "full", "intercepted", "intercepted"]


def test_one_layer_that_turns_eager_is_followed_before_it_computes(kinds):
    class Config:
        """A config of its own for one layer."""

        def __init__(self, config):
            self.config, self._attn_implementation = config, "eager"

        def __getattr__(self, name):
            return getattr(self.config, name)

    records = []
    for full in (True, False):
        kinds.clear()
        subject = zoo.make("llama")
        attention = subject.model.layers[1].self_attn
        with attemper.watch(subject.model, full=full) as watch:
            for step in range(5):
                if step == 3:
                    attention.config = Config(attention.config)
                with torch.no_grad():
                    subject.run()
                watch.step()
        records.append(watch.record)
    same_record(*records)
    assert kinds == ["full", "intercepted", "intercepted", "converted", "full"]


def test_a_module_that_was_added_between_two_watches():
    """Its forward begins inside a layer, where an intercepted pass cannot become a full one."""
    model, x = stack(), torch.randn(2, 6, 16)
    before = [(row["layer"], row["kind"]) for row in watched(model, x).to_dicts()]
    watched(model, x)
    inner = model[0].packed
    inner.added = nn.Identity()
    handle = inner.register_forward_hook(lambda module, given, made: module.added(made))
    assert [(row["layer"], row["kind"]) for row in watched(model, x).to_dicts()] == before
    handle.remove()


def watched(model, x):
    with torch.no_grad(), attemper.watch(model) as watch:
        model(x)
    return watch.record
