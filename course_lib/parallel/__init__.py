"""Many devices: meshes, collectives, and the strategies that divide training among devices.

One file a subject, each read on its own; import the one that you need (`from course_lib.parallel import mesh`).
"""
