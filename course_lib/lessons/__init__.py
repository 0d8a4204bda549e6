"""What only the course needs: the case study, and faults that many-device code has had. Nothing
imports it.
"""
