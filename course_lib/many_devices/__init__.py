"""Part II: meshes, collectives, and the strategies that divide training among devices.

Each technique's module reads on its own and has the name of its notebook, 07 to 14; notebook 12
is `strategies`. In this order a run is made of them:

    meshes      devices in a grid with named axes; the names of all axes, and their modules
    collectives all of them, built from one step around a ring
    axis        a strategy as a value: what the axis of its name divides, and how
    data_parallel, pipeline_parallel, expert_parallel, context_parallel, tensor_parallel
                the five strategies, each loaded when a mesh has its axis
    options     the choices of a run (`Strategy`), and what a mesh and a model refuse
    sharding    which axis cuts which dimension of which parameter
    strategies  `build`: the run of one device on a mesh, by hand, compiler or types
    cluster_model
                seconds of collectives on a cluster, for `planner`
"""
