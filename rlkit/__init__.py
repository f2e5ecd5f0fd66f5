"""rlkit: why is this asynchronous GRPO run slow, what to change, and what that will cost.

The way of the data, one module a step:

    rlkit.recipe      a run as data                     rlkit.preflight   what would go wrong, before it starts
    rlkit.engines     where its jobs execute            rlkit.training    what runs in the trainer job
    rlkit.serving     between trainer and replicas      rlkit.tracking    trackio in, one frame per run out
    rlkit.diagnosis   frame in, verdict out             rlkit.figures     frames in, plotly out
    rlkit.report      notebook in, one HTML file out    rlkit.cli         the command line
    rlkit.simulation  a recipe in, its run out, without a machine
    rlkit.scoreboard  several runs in, one row a run out (scoreboard_text: tables to read)
    rlkit.overlay     what a figure of several runs shows, chase_figures draws it, run_looks tells runs apart
    rlkit.five_runs   the published chase run again, walk shows it run by run
"""

__version__ = "0.1.0"
