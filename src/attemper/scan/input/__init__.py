"""What a scan runs: a model and its inputs.

pipes.py        the bytes of a file or a pipe: texts, an older scan
model.py        load(): the model, from a folder, the hub's cache or the embedded package
folder.py       which files a model's folder must have, what is refused unopened, whether the weights fit the config
batch.py        make(): one Input for each text, image or sound (calls text and media)
text.py         a text as the tokens of the model's tokenizer
trial.py        what an untrusted tokenizer does, tried in a child with limits of memory and time
media.py        an image or a sound as the tensors of the model's preprocessor
"""
