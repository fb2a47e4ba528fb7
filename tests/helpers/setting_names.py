"""The names of a framework's settings in the texts of ``settings.json``."""

import re

PLAIN_WORDS = {"above", "and", "below", "in", "of", "or", "place", "under", "with"}
"""Words between names."""

OF_BANDPO = (
    r"\S*bandpo\S*|BANDPO_METHOD|BandGRPOTrainer|AuditedGRPOTrainer|GRPOTrainer"
    r"|(?<!\S)\+?[\w.]*method='[^']*'|\"[^\"]*\""
)
"""What bandpo adds: its own modules and classes, and values."""


def names_in(text):
    """Return the names of settings in a text such as ``rollout.temperature, .top_p``, which names ``rollout.top_p``.

    Args:
        text: One value of ``settings.json``.
    """
    # A setting whose value is bandpo's is kept, its value is not.
    text = re.sub(r"([\w.+-]+)=\S*bandpo\S*", r"\1", text)
    text = re.sub(OF_BANDPO, " ", text)
    names = []
    for word in re.split(r"[\s,×=]+", text):
        word = word.strip("+[]")
        if not word or word in PLAIN_WORDS or word.isdigit():
            continue
        if word.startswith("."):
            word = names[-1].rpartition(".")[0] + word
        names.append(word)
    return names
