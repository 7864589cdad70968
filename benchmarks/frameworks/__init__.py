"""Train one problem by hand, with Evener, Lightning, Accelerate, HF Trainer and Ignite, as their documentation says."""
