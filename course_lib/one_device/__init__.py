"""Part I: the techniques for one device, a module for each of notebooks 01 to 04 and 06,
and the gradient's noise for notebook 22.
"""
