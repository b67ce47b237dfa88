"""The figures, tables and claims of the papers that streamkern comes from, each by one command.

    python -m experiments                                   the list
    python -m experiments ep3_fig2                          on the built-in data or a made problem
    python -m experiments ep3_fig2 --data fashion-mnist     on the paper's data, in a folder

`experiments.catalogue` lists the modules, one for each figure, table or claim.
"""
