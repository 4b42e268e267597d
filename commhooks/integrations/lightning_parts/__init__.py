"""What the integrations with ``lightning`` and with ``pytorch_lightning`` share.

Both packages have the same classes under different names, and neither accepts the other's. So the
code is in classes that inherit from neither; ``integrations/lightning.py`` and
``integrations/pytorch_lightning.py`` join them with the classes of their package.
"""
