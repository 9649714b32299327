"""The reference part of the manual, ``docs/reference``, generated from the declarations in the code."""
