"""pronouns: pairs of sentences that differ in one word, which decides what a pronoun refers to.

In a pair by *meaning* the word comes after "it", and only what the words mean decides: a ball is round, a dog is fast. In a pair
by *agreement* the pronoun itself is exchanged, and its form decides: "he" is the king. Every word that is named here is one token
of the embedded model, so both sentences of a pair have the same tokens but one. No pair was taken out for what it measured.
"""

from __future__ import annotations

from typing import NamedTuple


class PronounPair(NamedTuple):
    """A sentence with a gap ``{}``; the words that fill it refer the pronoun to ``first`` or to ``second``."""

    sentence: str
    first: str
    second: str
    for_first: str
    for_second: str

    @property
    def texts(self) -> tuple[str, str]:
        """Both sentences: about the first noun, about the second."""
        return self.sentence.format(self.for_first), self.sentence.format(self.for_second)


_TOO_LARGE = (
    ("trophy", "in the suitcase", "big", "small"),
    ("book", "on the shelf", "big", "small"),
    ("bag", "in the box", "big", "small"),
    ("table", "in the kitchen", "big", "small"),
    ("piano", "in the elevator", "big", "small"),
    ("sofa", "through the door", "wide", "narrow"),
    ("car", "in the garage", "wide", "narrow"),
    ("boat", "under the bridge", "tall", "low"),
)
_BECAUSE = (
    ("dog chased the ball", "fast", "round"),
    ("truck passed the bus", "fast", "slow"),
    ("cat caught the mouse", "quick", "slow"),
    ("fish ate the worm", "hungry", "dead"),
    ("knife cut the rope", "sharp", "thin"),
    ("cow ate the grass", "hungry", "fresh"),
    ("storm destroyed the hut", "violent", "wooden"),
    ("hammer broke the glass", "heavy", "fragile"),
    ("horse refused the apple", "full", "rotten"),
    ("bird left the nest", "hungry", "broken"),
    ("rock broke the window", "hard", "thin"),
    ("wolf killed the sheep", "hungry", "weak"),
    ("bear left the cave", "hungry", "dark"),
    ("fire melted the ice", "hot", "thin"),
    ("robot lifted the box", "strong", "light"),
    ("elephant broke the chair", "heavy", "weak"),
    ("lion hunted the deer", "hungry", "slow"),
    ("lamp lit the room", "bright", "dark"),
    ("nail went through the board", "sharp", "soft"),
    ("needle went through the cloth", "sharp", "thin"),
    ("chicken crossed the road", "hungry", "empty"),
    ("eagle spotted the rabbit", "hungry", "white"),
    ("mouse ate the cheese", "hungry", "soft"),
    ("monkey dropped the fruit", "scared", "rotten"),
    ("ship hit the rock", "fast", "hidden"),
    ("arrow missed the target", "bent", "small"),
    ("ladder did not reach the window", "short", "high"),
    ("spider caught the fly", "hungry", "tired"),
    ("train hit the cow", "fast", "blind"),
    ("horse jumped over the fence", "strong", "low"),
    ("bee visited the flower", "busy", "yellow"),
    ("fox could not reach the fruit", "small", "high"),
    ("cat slept on the carpet", "tired", "soft"),
    ("bird drank from the cup", "thirsty", "full"),
    ("horse drank the water", "thirsty", "clean"),
    ("pig ate the corn", "hungry", "ripe"),
    ("stone sank in the lake", "heavy", "deep"),
    ("tiger left the cage", "angry", "open"),
    ("cat left the house", "bored", "empty"),
    ("frog jumped into the pond", "dry", "cool"),
)
_COUPLES = (
    ("boy", "girl"), ("king", "queen"), ("father", "mother"), ("man", "woman"), ("brother", "sister"), ("uncle", "aunt"),
    ("son", "daughter"), ("husband", "wife"), ("prince", "princess"), ("actor", "actress"), ("gentleman", "lady"),
    ("grandfather", "grandmother"),
)  # fmt: skip
_MEETINGS = (
    "The {} thanked the {} because {{}} was kind.",
    "The {} met the {} after {{}} left the town.",
    "The {} called the {} when {{}} came home.",
)


def _meaning() -> tuple[PronounPair, ...]:
    fitting = [
        PronounPair(f"The {one} did not fit {where} because it was too {{}}.", one, where.split()[-1], *words)
        for one, where, *words in _TOO_LARGE
    ]
    because = [
        PronounPair(f"The {said} because it was {{}}.", said.split()[0], said.split()[-1], *words)
        for said, *words in _BECAUSE
    ]
    return (*because, *fitting)


def _agreement() -> tuple[PronounPair, ...]:
    """Every couple in both orders, so that no place in the sentence belongs to one pronoun."""
    ordered = [(*couple, "he", "she") for couple in _COUPLES] + [(*couple[::-1], "she", "he") for couple in _COUPLES]
    return tuple(
        PronounPair(_MEETINGS[place % len(_MEETINGS)].format(first, second), first, second, *pronouns)
        for place, (first, second, *pronouns) in enumerate(ordered)
    )


PRONOUN_PAIRS = {"meaning": _meaning(), "agreement": _agreement()}
"""By what decides."""
