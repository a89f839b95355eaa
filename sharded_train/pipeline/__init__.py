"""The pipeline axis: which stage has which layers, and the executor of a schedule's table."""

from sharded_train.pipeline.stages import Pipeline, PipelineConfig, pipeline_of

__all__ = ["Pipeline", "PipelineConfig", "pipeline_of"]
