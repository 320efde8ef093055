"""extension: what a package beside attemper may use beyond its public names; `attemper_lab` uses nothing else.

    calls     every attention call of a model while its q, k and logits exist: examiners, weights of chosen rows
    inputs    a model and its inputs, loaded and run as a scan does
    files     files that are written whole, and packages that may be missing
    tools     errors that name the next step, text that fits a terminal, reports
    machine   versions, devices and processors
    command   the parts of the command line that all commands share

These names are as stable as the public ones: the changelog lists every change. Each file imports only what its names
need, so that a command can be parsed without torch.
"""
