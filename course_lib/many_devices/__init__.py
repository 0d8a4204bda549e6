"""Part II: meshes, collectives, and the strategies that divide training among devices.

Each module reads on its own and has the name of its notebook, 07 to 11; notebook 12 is
`strategies`, notebook 13 `context_parallel`, notebook 14 `expert_parallel`.
"""
