"""rlkit: why is this asynchronous GRPO run slow, what to change, and what that will cost.

The way of the data, one module a step:

    rlkit.recipe      a run as data                     rlkit.preflight   what would go wrong, before it starts
    rlkit.engines     where its jobs execute            rlkit.training    what runs in the trainer job
    rlkit.serving     between trainer and replicas      rlkit.tracking    trackio in, one frame per run out
    rlkit.diagnosis   frame in, verdict out             rlkit.figures     frames in, plotly out
    rlkit.advice      what to change after a run        rlkit.chase       doing so until nothing pays
    rlkit.report      notebook in, one HTML file out    rlkit.cli         the command line
    rlkit.simulation  a recipe in, its run out, without a machine
"""

__version__ = "0.1.0"
