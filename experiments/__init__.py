"""Figures, tables and claims of the papers behind streamkern, each repeated by one command.

    python -m experiments                                   the list
    python -m experiments ep3_fig2                          on built-in or synthetic data
    python -m experiments ep3_fig2 --data fashion-mnist     on the paper's data, in a folder

`experiments.catalogue` lists the modules, one for each figure, table or claim.
"""
