"""The models that the course trains, and what they are made of. Notebook 05 builds
`transformer`.
"""
