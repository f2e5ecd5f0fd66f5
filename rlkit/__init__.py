"""rlkit: why is this asynchronous GRPO run slow, what to change, and what that will cost.

The way of the data, one module a step:

    rlkit.recipe      a run as data                     rlkit.preflight   what would go wrong, before it starts
    rlkit.engines     where its jobs execute            rlkit.training    what runs in the trainer job
    rlkit.serving     between trainer and replicas      rlkit.tracking    trackio in, one frame per run out
    rlkit.diagnosis   frame in, verdict out             rlkit.figures     frames in, plotly out
    rlkit.report      notebook in, one HTML file out    rlkit.cli         the command line
    rlkit.simulation  a recipe in, its run out, without a machine
    rlkit.sweep       a grid as data: its points, and which to start next
    rlkit.sweep_run   each point a notebook's run: sweep_kernels and sweep_nursery start them, sweep_point is inside
    rlkit.sweep_table one row a point; sweep_figures compares them, sweep_view reads a sweep back
    rlkit.what_if     a recipe with other settings, predicted; what_if_view has the sliders
    rlkit.routing_story   where rollouts went and why; routing_figures draws it
"""

__version__ = "0.1.0"
