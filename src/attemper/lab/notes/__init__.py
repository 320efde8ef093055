"""The five notes on √d_k that this lab answers, sentence by sentence.

In the order in which the page is made:

    sentences.py   what the notes say, in our words, each with the claims that judge it
    reading.py     the tables beside it: symbols, takeaways, a summary for an interview, Hinglish, credits
    page.py        docs/notes.md from the sentences and the judged claims
"""
