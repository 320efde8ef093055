"""testing: assertions about the attention of any model, for the tests of people who write one.

    from attemper.testing import assert_causal

    def test_my_model_is_causal():
        assert_causal(MyModel(), torch.randint(0, 100, (2, 16)))

Each makes a few forward passes in evaluation mode, without gradients, and changes nothing: weights, buffers, attributes, the
batch and every random state are as before. A failure is an AssertionError that names the layer and the number; a batch that
cannot show the answer raises an InputError that says what to pass. Differences that rounding explains do not count.

assertions.py   all of them
"""

from .assertions import assert_cache_matches as assert_cache_matches
from .assertions import assert_causal as assert_causal
from .assertions import assert_heads_keep_positions as assert_heads_keep_positions
from .assertions import assert_ignores_padding as assert_ignores_padding
from .assertions import assert_items_independent as assert_items_independent
from .assertions import assert_packed_matches as assert_packed_matches
from .assertions import assert_repeatable as assert_repeatable
from .assertions import assert_scale as assert_scale
