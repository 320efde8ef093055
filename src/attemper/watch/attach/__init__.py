"""attach: intercepted functions and a dispatch mode show the attention calls of a watched forward; they are measured.

Data passes the files in this order:

    names         names the modules of a model, without the wrappers around it
    attachment    sees which module runs; passes each call to its measurement; keeps errors of attemper's own from the model
    dispatch      the mode that gets each op of a full pass and passes it to a route
    dynamo        makes torch.compile run eagerly while a step is measured
    running       holds the modules in their forward and the state of one pass, per thread
    learned       keeps what a full pass showed, for the light passes that follow
    light         intercepts the functions that models call for attention, so that a light pass needs no mode
    overrides     puts torch's functions back while a class or a mode answers a call of one
    again         counts calls like earlier ones on a GPU by the rows of their signs alone
    storages      keeps facts about tensors, by the memory behind them
    modes         runs code without autograd, autocast and dispatch modes
    measuring     computes the vitals of a call and folds them into heads
    gradients     sums |dq| and |dk| when the backward computes them
"""
