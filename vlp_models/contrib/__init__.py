"""Capabilities that a user can do without: one folder each, and the core never imports one.

A folder has its code and, if it adds commands to `vlp`, a `commands.py` with `COMMANDS` and `WORK` as in cli/main.py.
Its tests are in tests/contrib/NAME. With a folder deleted, everything else works. docs/design/code.md lists the kinds
of entries, and where the line to the core is.
"""

# folder -> what it adds to the tables of plugins: kind -> name -> `module:object`. Entries of the kind `params` are its
# sections of params.yaml, by dotted name (`finetune.NAME.lora`); without the folder, one at the top of the file is
# ignored, and any other is an error that names the folder.
CONTRIB: dict[str, dict[str, dict[str, str]]] = {
    "artifacts": {"publishers": {"artifacts": "vlp_models.contrib.artifacts.tables:publish"}},
    "audit": {
        "params": {"validate.audit": "vlp_models.contrib.audit.params:AuditParams"},
        "flags": {"audit": "vlp_models.contrib.audit.decisions:read_flagged"},
        "flag_files": {"audit": "vlp_models.contrib.audit.decisions:files"},
    },
    "augment": {
        "stages": {"augment": "vlp_models.contrib.augment.captions:run"},
        "stage_builders": {"augment": "vlp_models.contrib.augment.plan:augment"},
        "augmented": {"samples": "vlp_models.contrib.augment.samples:augment_samples"},
        "params_checks": {"augment": "vlp_models.contrib.augment.params:check_augment"},
    },
    "bisect": {
        "params": {"bisect": "vlp_models.contrib.bisect.params:BisectParams"},
        "last_parts": {"bisect": "vlp_models.contrib.bisect.flow:bisect_parts"},
        "differences": {"since": "vlp_models.contrib.bisect.since:print_differences"},
        "card_facts": {"champion": "vlp_models.contrib.bisect.card:card_fact"},
        "report_sections": {"changes": "vlp_models.contrib.bisect.answers:report_section"},
    },
    "boxes": {"generators": {"boxes": "vlp_models.contrib.boxes.dataset:write"}},
    "bundles": {"run_bundles": {"bundle": "vlp_models.contrib.bundles.run_bundle:open_bundle"}},
    "commit": {"last_parts": {"commit": "vlp_models.contrib.commit.flow:commit_parts"}},
    "compare": {"report_sections": {"variants": "vlp_models.contrib.compare.variants:variants"}},
    "costs": {
        "meters": {"costs": "vlp_models.contrib.costs.meter:measure"},
        "report_sections": {"costs": "vlp_models.contrib.costs.costs:report_section"},
        "card_facts": {"costs": "vlp_models.contrib.costs.costs:card_fact"},
        "history_notes": {"costs": "vlp_models.contrib.costs.costs:history_notes"},
    },
    "croissant": {},
    "data_notes": {
        "plan_notes": {
            "untracked": "vlp_models.contrib.data_notes.untracked:find_untracked",
            "sizes": "vlp_models.contrib.data_notes.sizes:explain_sizes",
            "variants": "vlp_models.contrib.data_notes.variants:explain_variants",
        }
    },
    "demo_page": {},
    "detector": {
        "region_sources": {"detector": "vlp_models.vision.extractors:open_source"},
        "extractors": {"detector": "vlp_models.contrib.detector.regions:open_detector"},
        "detectors": {
            "train": "vlp_models.contrib.detector.detector_stage:make_detector",
            "weights": "vlp_models.contrib.detector.detector_stage:make_detector",
        },
        "warmups": {"vision_warmup": "vlp_models.contrib.detector.initial_stage:warm_up"},
        "first_steps": {
            "detector": "vlp_models.contrib.detector.detector_stage:first_detector_step",
            "vision_warmup": "vlp_models.contrib.detector.initial_stage:first_warmup_step",
        },
    },
    "doctor": {},
    "dossier": {},
    "drift": {
        "params": {"drift": "vlp_models.contrib.drift.params:DriftParams"},
        "stages": {"training_stats": "vlp_models.contrib.drift.training_stats:run"},
        "stage_builders": {"training_stats": "vlp_models.contrib.drift.plan:training_stats"},
        "new_data_parts": {"drift": "vlp_models.contrib.drift.plan:drift_part"},
    },
    "export": {
        "api": {"VLP": "vlp_models.contrib.export.hub:VLP"},
        "exports": {"find": "vlp_models.contrib.export.hub:find_export"},
    },
    "forgetting": {"withdrawn": {"read": "vlp_models.contrib.forgetting.withdrawn:read_withdrawn"}},
    "fsdp": {"strategies": {"fsdp": "vlp_models.contrib.fsdp.strategy:make_strategy"}},
    "hub_datasets": {"formats": {"hf": "vlp_models.contrib.hub_datasets.reader:read"}},
    "hub_models": {
        "hub_folders": {
            "find": "vlp_models.contrib.hub_models.folder:find_folder",
            "pin": "vlp_models.contrib.hub_models.folder:pin",
        },
        "families": {
            "dual_encoder": "vlp_models.contrib.hub_models.dual_encoder:DualEncoder",
            "language_model_decoder": "vlp_models.contrib.hub_models.language_model_decoder:LanguageModelDecoder",
        },
        "baselines": {"dual_encoder": "vlp_models.contrib.hub_models.zero_shot:score_untrained"},
        "params": {"features.tower": "vlp_models.contrib.hub_models.params:TowerParams"},
        "region_sources": {"tower": "vlp_models.vision.extractors:open_source"},
        "extractors": {"tower": "vlp_models.contrib.hub_models.tower_regions:TowerExtractor"},
        "detectors": {"tower": "vlp_models.contrib.hub_models.tower_regions:make_tower"},
        "backbone_checks": {"tower": "vlp_models.contrib.hub_models.tower_regions:check_tower"},
    },
    "imported_features": {
        "region_sources": {
            "tsv": "vlp_models.contrib.imported_features.tsv:open_tsv",
            "npz": "vlp_models.contrib.imported_features.npz:open_npz",
        }
    },
    "influence": {
        "params": {"validate.influence": "vlp_models.contrib.influence.params:InfluenceParams"},
        "flags": {"influence": "vlp_models.contrib.influence.removal:read_worst"},
        "flag_files": {"influence": "vlp_models.contrib.influence.removal:files"},
    },
    "ingest": {"new_data_parts": {"ingest": "vlp_models.contrib.ingest.flow:ingest_part"}},
    "int8": {
        "export_weights": {"int8": "vlp_models.contrib.int8.equivalence:make_equivalent_bundle"},
        "quantized_layers": {"int8": "vlp_models.contrib.int8.layers:use_int8_layers"},
    },
    "joined_features": {
        "params": {"features.joined": "vlp_models.contrib.joined_features.params:JoinedParams"},
        "region_sources": {"joined": "vlp_models.vision.extractors:open_source"},
        "extractors": {"joined": "vlp_models.contrib.joined_features.joined:JoinedExtractor"},
        "detectors": {"joined": "vlp_models.contrib.joined_features.joined:make_joined"},
        "backbone_checks": {"joined": "vlp_models.contrib.joined_features.joined:check_joined"},
    },
    "label": {},
    "languages": {"fitting_presets": {"vocabulary": "vlp_models.contrib.languages.vocabulary:choose_vocabulary"}},
    "launchers": {
        "params": {
            "cluster": "vlp_models.contrib.launchers.params:ClusterParams",
            "launchers": "vlp_models.contrib.launchers.params:LaunchersParams",
        },
        "engines": {
            "chunks": "vlp_models.contrib.launchers.ray_chunks:make_mapper",
            "training": "vlp_models.contrib.launchers.launch:launch",
        },
        "launchers": {
            "torchrun": "vlp_models.contrib.launchers.torchrun:start",
            "slurm": "vlp_models.contrib.launchers.slurm:start",
            "ray": "vlp_models.contrib.launchers.ray_train:start",
            "kubeflow": "vlp_models.contrib.launchers.kubeflow:start",
        },
    },
    "lineage": {},
    "lmms_eval": {},
    "lora": {
        "params": {"finetune.NAME.lora": "vlp_models.contrib.lora.params:LoraParams"},
        "adapters": {
            "add": "vlp_models.contrib.lora.adapters:add_lora",
            "publish": "vlp_models.contrib.lora.adapters:publish_adapters",
        },
    },
    "notify": {
        "notifiers": {"webhook": "vlp_models.contrib.notify.webhook:notify"},
        "status_lines": {"disk": "vlp_models.contrib.notify.events:describe_forecast"},
    },
    "parallel_finetune": {
        "before_repro": {"parallel_finetune": "vlp_models.contrib.parallel_finetune.run:finetune_in_parallel"}
    },
    "parts": {
        "params": {"finetune.NAME.parts": "vlp_models.contrib.parts.params:PartsParams"},
        "params_checks": {"parts": "vlp_models.contrib.parts.params:check_parts"},
        "stages": {"part": "vlp_models.contrib.parts.train:run"},
        "stage_builders": {"part": "vlp_models.contrib.parts.plan:part"},
        "parts": {
            "checkpoints": "vlp_models.contrib.parts.plan:part_checkpoints",
            "average": "vlp_models.contrib.parts.train:average",
        },
    },
    "plugin_kit": {},
    "project_api": {"api": {"Project": "vlp_models.contrib.project_api.project:Project"}},
    "public_weights": {
        "plan_notes": {"widths": "vlp_models.contrib.public_weights.widths:explain_widths"},
        "init_readers": {
            "text_init": "vlp_models.contrib.public_weights.bert:read_bert",
            "image_init": "vlp_models.contrib.public_weights.timm:read_timm",
        },
        "text_readers": {
            "tden": "vlp_models.contrib.public_weights.tden:convert_bert",
            "unified_vlp": "vlp_models.contrib.public_weights.unified_vlp:convert_bert",
            "xgpt": "vlp_models.contrib.public_weights.xgpt:convert_bert",
            "vlmo": "vlp_models.contrib.public_weights.vlmo:convert_bert",
            "soho": "vlp_models.contrib.public_weights.soho:convert_bert",
        },
        "image_readers": {
            "soho": "vlp_models.contrib.public_weights.soho:read_timm_backbone",
            "vlmo": "vlp_models.contrib.public_weights.vlmo_images:read_timm_weights",
        },
    },
    "reasoning_tasks": {
        "scene_files": {
            "vcr_per_image": "vlp_models.contrib.reasoning_tasks.scenes.vcr:write_vcr",
            "hypotheses_per_image": "vlp_models.contrib.reasoning_tasks.scenes.entailment:write_hypotheses",
            "pair_sentences": "vlp_models.contrib.reasoning_tasks.scenes.image_pairs:write_pairs",
        },
        "tasks": {
            "nlvr": "vlp_models.contrib.reasoning_tasks.nlvr:NLVR",
            "nlvr2": "vlp_models.contrib.reasoning_tasks.nlvr:NLVR2",
            "entailment": "vlp_models.contrib.reasoning_tasks.entailment:Entailment",
            "vcr": "vlp_models.contrib.reasoning_tasks.vcr:VCR",
        },
    },
    "report_pictures": {
        "figures": {
            "vlmo": "vlp_models.contrib.report_pictures.vlmo_experts:figures",
            "soho": "vlp_models.contrib.report_pictures.soho_codes:figures",
        },
        "report_sections": {"pictures": "vlp_models.contrib.report_pictures.section:pictures"},
    },
    "research_formats": {
        "formats": {
            "nlvr": "vlp_models.contrib.research_formats.nlvr:read",
            "nlvr2": "vlp_models.contrib.research_formats.nlvr:read_nlvr2",
            "vcr": "vlp_models.contrib.research_formats.vcr:read",
            "snli_ve": "vlp_models.contrib.research_formats.snli_ve:read",
            "esnli_ve": "vlp_models.contrib.research_formats.snli_ve:read_esnli_ve",
            "flickr8k": "vlp_models.contrib.research_formats.flickr:read_flickr8k",
            "flickr30k": "vlp_models.contrib.research_formats.flickr:read_flickr30k",
            "daquar": "vlp_models.contrib.research_formats.daquar:read",
            "conceptual_captions": "vlp_models.contrib.research_formats.downloaded:read_conceptual_captions",
            "sbu": "vlp_models.contrib.research_formats.downloaded:read_sbu",
            "visual_genome": "vlp_models.contrib.research_formats.visual_genome:read",
        }
    },
    "retention": {
        "params": {"retention": "vlp_models.contrib.retention.params:RetentionParams"},
        "last_parts": {"prune": "vlp_models.contrib.retention.flow:prune_parts"},
    },
    "shared_objectives": {
        "shared_objectives": {
            "add": "vlp_models.contrib.shared_objectives.heads:add_objectives",
            "known": "vlp_models.contrib.shared_objectives.heads:known_objectives",
        }
    },
    "sinks": {
        "sinks": {
            "wandb": "vlp_models.contrib.sinks.package_runs:WandbRun",
            "trackio": "vlp_models.contrib.sinks.package_runs:TrackioRun",
        }
    },
    "stack": {"status_lines": {"prefect": "vlp_models.contrib.stack.commands:describe"}},
    "streaming": {
        "streaming": {
            "open": "vlp_models.contrib.streaming.blocks:open_shards",
            "layout": "vlp_models.contrib.streaming.blocks:Layout",
            "order": "vlp_models.contrib.streaming.order:BlockOrder",
        }
    },
    "upgrade": {},
    "validation_page": {"validation_pages": {"page": "vlp_models.contrib.validation_page.page:write_page"}},
    "verify": {},
    "web_scenes": {"generators": {"web": "vlp_models.contrib.web_scenes.dataset:write"}},
}
