"""The stages of the speech recipe, each from folder to folder: the glue between speech and engine."""
