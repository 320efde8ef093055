"""Intercepted passes, by who calls whom: hooks of users, other models, captured methods, exceptions, threads in a forward."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from attemper.watch.attach.running import running
from watched import Block, compare, stack, steps

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


class AttentionLayer(nn.Module):
    """A module around the one that attends: an intercepted pass keeps no frame of it."""

    def __init__(self, inner=None):
        super().__init__()
        self.inner, self.out = inner or Block(), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.out(self.inner(x))


class Changing(Block):
    """It attends as told: as Block does, twice, by hand, or not at all."""

    way = "once"

    def forward(self, x):
        if self.way == "none":
            return x
        if self.way == "by hand":
            q, k, v = self.packed(x).chunk(3, -1)
            return x + (q @ k.mT / 4).softmax(-1) @ v
        return super().forward(super().forward(x) if self.way == "twice" else x)


def layers(count=3):
    return nn.Sequential(*(AttentionLayer(Changing()) for _ in range(count)))


@pytest.mark.parametrize("place", range(3))
def test_a_call_too_many_is_followed_before_it_computes(place, kinds):
    """Layers after it, and the modules around it, are seen as in a full pass."""

    def change(model, step):
        model[place].inner.way = "twice" if step == 3 else "once"

    found = compare(layers, lambda model, watch: steps(model, watch, change), kinds)
    assert found == ["full", "intercepted", "intercepted", "converted", "full", "intercepted"]


def test_a_module_inside_that_is_replaced(kinds):
    def change(model, step):
        if step == 3:
            model[1].inner = Changing()
            model[1].inner.way = "by hand"

    found = compare(layers, lambda model, watch: steps(model, watch, change), kinds)
    assert found == ["full", "intercepted", "intercepted", "converted", "full", "full"]


def test_a_new_module_after_the_call_inside_of_a_module_that_is_named_attention(kinds):
    """The call before it accounts for that module, as in a full pass."""

    def change(model, step):
        if step == 3:
            model.before = [model[1].out]  # what is gone makes all that was learned void
            model[1].out = nn.Sequential(nn.Linear(16, 16))

    found = compare(layers, lambda model, watch: steps(model, watch, change), kinds)
    assert found == ["full", "intercepted", "intercepted", "converted", "full", "intercepted"]


def test_layers_in_another_order_and_one_twice_in_place_of_another(kinds):
    def change(model, step):
        if step == 3:
            model[0], model[1] = model[1], model[0]
        if step == 5:
            model[2] = model[0]

    found = compare(layers, lambda model, watch: steps(model, watch, change, 8), kinds)
    assert found == ["full", "intercepted", "intercepted", "intercepted", "full", "converted", "full", "intercepted"]


def test_a_layer_that_is_called_from_outside_of_its_model(kinds):
    class Outside(nn.Module):
        """It is not watched, and borrows a layer of the model that is."""

        def __init__(self, borrowed):
            super().__init__()
            self.borrowed, self.own = [borrowed], Block()

        def forward(self, x):
            return self.borrowed[0](self.own(x))

    def drive(model, watch):
        outside, x, seen = Outside(model[1].inner), torch.randn(2, 5, 16), []
        for step in range(5):
            seen += [model(x).detach(), outside(x).detach()]
            if step % 2:
                seen += [model[0](x).detach(), model[1].inner(x).detach()]
            watch.step()
        return seen

    found = compare(layers, drive, kinds)
    assert found[:2] == ["full", "full"]  # two entries, and two more in the second step
    assert "converted" not in found
    assert found.count("full") == 3  # model, inner, model[0]: one plan for the inner layer, whoever calls it


@pytest.mark.parametrize("changes", [False, True])
def test_a_model_inside_of_another(changes, kinds):
    class Outer(nn.Module):
        """It runs another model that is no submodule of it."""

        def __init__(self):
            super().__init__()
            self.first, self.hidden = AttentionLayer(), [stack()]

        def forward(self, x):
            return self.hidden[0](self.first(x))

    def change(model, step):
        if changes and step == 3:
            model.hidden[0] = stack()

    found = compare(Outer, lambda model, watch: steps(model, watch, change), kinds)
    # with a module that is gone, all that was learned is void
    assert found == [
        "full",
        "intercepted",
        "intercepted",
        "full" if changes else "intercepted",
        "intercepted",
        "intercepted",
    ]


def test_hooks_of_users(kinds):
    """On modules of the model and on all modules, from the start and from a step on; one changes the output, one attends."""
    seen = []

    def make():
        model = layers()
        model[0].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        model[0].inner.register_forward_hook(lambda module, args, output: output + 1)
        return model

    def change(model, step):
        if step == 2:
            handles.append(register_module_forward_pre_hook(lambda module, args: seen.append(type(module))))
            handles.append(register_module_forward_hook(lambda module, args, output: seen.append(type(module))))
            model[1].out.register_forward_hook(lambda module, args, output: output * 2)
        if step == 4:
            attend = F.scaled_dot_product_attention
            model[2].out.register_forward_hook(
                lambda module, args, output: (
                    attend(*[output.unflatten(-1, (2, 8)).transpose(1, 2)] * 3).transpose(1, 2).flatten(2)
                )
            )

    handles, counts = [], []

    def drive(model, watch):
        seen.clear()
        try:
            return steps(model, watch, change, 7)
        finally:
            counts.append(len(seen))
            while handles:
                handles.pop().remove()

    found = compare(make, drive, kinds)
    assert found == ["full", *["intercepted"] * 3, "converted", "full", "intercepted"]
    assert counts[0] == counts[1] > 0


def test_methods_that_were_captured_before(kinds):
    def make():
        model = layers()
        model.captured = [model[1].__call__]
        model.forward = lambda x: model[2](model.captured[0](model[0](x)))
        return model

    assert compare(make, lambda m, w: steps(m, w, count=3), kinds) == ["full", "intercepted", "intercepted"]


def test_a_class_with_a_call_of_its_own(kinds):
    class Calling(AttentionLayer):
        def __call__(self, x):
            return super().__call__(x) * 2

    def make():
        return nn.Sequential(Calling(), Calling())

    assert compare(make, lambda m, w: steps(m, w, count=3), kinds) == ["full", "intercepted", "intercepted"]


@pytest.mark.parametrize("converts", [False, True])
def test_an_exception_that_the_model_catches(converts, kinds):
    class Failing(AttentionLayer):
        fails = False

        def forward(self, x):
            x = super().forward(x)
            if self.fails:
                raise RuntimeError("caught by the model")
            return x

    class Catching(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Failing(Changing()), AttentionLayer(Changing())

        def forward(self, x):
            try:
                x = self.first(x)
            except RuntimeError:
                x = x + 1
            return self.second(x)

    def change(model, step):
        model.first.fails = step == 3
        if converts:
            model.first.inner.way = "twice" if step == 3 else "once"

    found = compare(Catching, lambda model, watch: steps(model, watch, change), kinds)
    assert found == [
        "full",
        "intercepted",
        "intercepted",
        *(["converted", "full", "intercepted"] if converts else ["intercepted"] * 3),
    ]


def test_a_thread_inside_of_a_forward(kinds):
    """Its modules are passes of their own, in a full pass and in an intercepted one."""

    class Forking(nn.Module):
        def __init__(self):
            super().__init__()
            self.here, self.there = AttentionLayer(), AttentionLayer()

        def forward(self, x):
            found = []
            thread = threading.Thread(target=lambda: found.append(self.there(x.detach())))
            thread.start()
            thread.join()
            return self.here(x) + found[0]

    found = compare(Forking, lambda model, watch: steps(model, watch, count=4), kinds)
    assert found == ["full", "full", *["intercepted"] * 6]


def test_modules_that_a_pass_enters_as_it_becomes_a_full_one(kinds):
    """A module that is new has one frame: what runs after it is not inside of it."""

    class NewAttention(AttentionLayer):
        def forward(self, x):
            return x + self.out(x)  # named attention, without a call

    def change(model, step):
        if step == 3:
            model.before = [model[1]]
            model[1] = NewAttention()

    class Named(nn.Sequential):
        """The names of frames are read while the model runs."""

        def forward(self, x):
            for layer in self:
                x = layer(x)
                depths.append([frame.name for frame in running.frames])
            return x

    depths = []
    found = compare(lambda: Named(*layers()), lambda model, watch: steps(model, watch, change), kinds)
    assert found == ["full", "intercepted", "intercepted", "converted", "full", "full"]
    assert depths == [[""]] * len(depths)
