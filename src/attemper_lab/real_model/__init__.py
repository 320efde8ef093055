"""Experiments on the heads of the embedded MiniLM, one question per file.

sentences.py has the model and the pairs of sentences that it reads, pronouns.py pairs in which one word decides what "it" is.
"""
