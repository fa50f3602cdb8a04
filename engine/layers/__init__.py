"""Defines the layers that several families of models have: functions and small modules over the operations of `engine.ops`."""
