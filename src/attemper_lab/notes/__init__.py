"""The five notes on √d_k that this lab answers, sentence by sentence.

lines.py is the answer, in one sentence and in ten lines.
sentences.py has what the notes say, in our words, each with the claims that judge it; research/notes.py makes docs/notes.md.
"""
