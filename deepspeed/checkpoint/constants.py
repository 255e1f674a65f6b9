"""Names in checkpoint files: keys, file prefixes and suffixes. The format is upstream's; these are
its only definitions here. Names of files are made of them by `file_names`.
"""

from __future__ import annotations

from deepspeed._lazy import lazy_attributes

# Upstream's further names here say what to use instead.
__getattr__ = lazy_attributes(__name__)

# Model-states file
MODULE = "module"
BUFFER_NAMES = "buffer_names"
OPTIMIZER = "optimizer"
PARAM_SHAPES = "param_shapes"
FROZEN_PARAM_SHAPES = "frozen_param_shapes"
SHARED_PARAMS = "shared_params"
FROZEN_PARAM_FRAGMENTS = "frozen_param_fragments"
LR_SCHEDULER = "lr_scheduler"
DATA_SAMPLER = "data_sampler"
RANDOM_LTD = "random_ltd"
SPARSE_TENSOR_MODULE_NAMES = "sparse_tensor_module_names"
SKIPPED_STEPS = "skipped_steps"
GLOBAL_STEPS = "global_steps"
GLOBAL_SAMPLES = "global_samples"
DP_WORLD_SIZE = "dp_world_size"
MP_WORLD_SIZE = "mp_world_size"
CHECKPOINT_PARALLEL_DIMS = "checkpoint_parallel_dimensions"
CHECKPOINT_PP_DEGREE = "pp_degree"
CHECKPOINT_TP_DEGREE = "tp_degree"
NUM_EXPERTS = "num_experts"  # of each layer with experts, where there are any
# Of each module of experts that is spread over ranks a dictionary with the four keys below.
AUTOEP_LAYERS_KEY = "ds_autoep_layers"
AUTOEP_EXPERT_KEY_PREFIX = "expert_key_prefix"
AUTOEP_NUM_EXPERTS = "num_experts"
AUTOEP_NUM_LOCAL_EXPERTS = "num_local_experts"
AUTOEP_EP_SIZE = "ep_size"
# Not upstream's, in model files of stage 3 and beside optimizer state that numbers its parameters
# (with PARAM_SHAPES per group, in the order of the numbers): by layer prefix how many ranks its
# experts are spread over.
EXPERT_GROUP_SIZES = "expert_group_sizes"
DS_CONFIG = "ds_config"
DS_VERSION = "ds_version"
# Not upstream's: version of the manifest that stands beside the file, so that a lost manifest is
# not taken for one that never was.
MANIFEST_VERSION = "manifest_version"

MODEL_STATE_KEYS = frozenset(
    {
        MODULE,
        BUFFER_NAMES,
        OPTIMIZER,
        PARAM_SHAPES,
        FROZEN_PARAM_SHAPES,
        SHARED_PARAMS,
        FROZEN_PARAM_FRAGMENTS,
        LR_SCHEDULER,
        DATA_SAMPLER,
        RANDOM_LTD,
        SPARSE_TENSOR_MODULE_NAMES,
        SKIPPED_STEPS,
        GLOBAL_STEPS,
        GLOBAL_SAMPLES,
        DP_WORLD_SIZE,
        MP_WORLD_SIZE,
        CHECKPOINT_PARALLEL_DIMS,
        NUM_EXPERTS,
        AUTOEP_LAYERS_KEY,
        EXPERT_GROUP_SIZES,
        DS_CONFIG,
        DS_VERSION,
        MANIFEST_VERSION,
    }
)

# Optimizer-states file
OPTIMIZER_STATE_DICT = "optimizer_state_dict"
BASE_OPTIMIZER_STATE = "base_optimizer_state"
BASE_OPTIMIZER_STATE_STEP = "base_optimizer_state_step"
# Not upstream's: elastic files hold moments only, and a resumed run needs its schedule's rates.
BASE_OPTIMIZER_PARAM_GROUPS = "base_optimizer_param_groups"
# Not upstream's: state of a shard that is kept by parameter, each whole with the rank that it is
# dealt to: name -> that parameter's state.
STATE_OF_PARAMETERS = "state_of_parameters"
SINGLE_PARTITION_OF_FP32_GROUPS = "single_partition_of_fp32_groups"
GROUP_PADDINGS = "group_paddings"
PARTITION_COUNT = "partition_count"
PARAM_SLICE_MAPPINGS = "param_slice_mappings"
CLIP_GRAD = "clip_grad"
ZERO_STAGE = "zero_stage"
LOSS_SCALER = "loss_scaler"
# Masters at stage 3
FP32_FLAT_GROUPS = "fp32_flat_groups"
# Masters and loss scale of the fp16 optimizers without ZeRO
FP32_GROUPS_FLAT = "fp32_groups_flat"
FP32_GROUPS = "fp32_groups"
MASTER_KEYS = {FP32_GROUPS_FLAT, FP32_GROUPS}
SCALER_KEYS = (
    "cur_scale",
    "cur_iter",
    "last_overflow_iter",
    "scale_factor",
    "scale_window",
    "cur_hysteresis",
)
DATA_BEFORE_EXPERTS = "use_data_before_expert_parallelism"

# Files
LATEST = "latest"
MODEL_FILE_PREFIX = "mp_rank_"
MODEL_FILE_SUFFIX = "_model_states.pt"
ZERO_FILE_PREFIX = "zero_pp_rank_"
BF16_ZERO_FILE_PREFIX = "bf16_" + ZERO_FILE_PREFIX
FP16_ZERO_FILE_PREFIX = "fp16_" + ZERO_FILE_PREFIX
OPTIM_FILE_SUFFIX = "_optim_states.pt"
LAYER_FILE_PREFIX = "layer_"

# Not upstream's: in a file whose tensors are in the format of torch.distributed.checkpoint, the
# name of the folder that holds them.
DCP_FOLDER = "torch.distributed.checkpoint folder"
# Files name these classes by their paths, which are therefore part of the format.
PICKLED_CLASSES = (
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "argparse.Namespace",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
)

# Universal checkpoints: a folder per parameter, a file per kind of its state
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
UNIVERSAL_CHECKPOINT_VERSION_KEY = "universal_checkpoint_version"
UNIVERSAL_CHECKPOINT_VERSION_VALUE = 0.4
LATEST_UNIVERSAL = "latest_universal"
UNIVERSAL_FOLDER = "zero"
UNIVERSAL_OPTIMIZER_FILE = "optimizer_state.pt"
FP32_WEIGHT_KEY = "fp32"
PARAM = "param"
CAT_DIM = "cat_dim"
VOCAB_TENSOR = "vocab_tensor"
PARAM_N_SUB_PARAMS = "param_n_sub_params"
SUB_PARAM_SHAPE = "sub_param_shape"
# Upstream's further spellings, which scripts import.
SUB_PARAMS_SHAPE = "sub_params_shape"
SUB_PARAM_SHARD_WIDTHS = "sub_param_shard_widths"
PARAM_GROUPS = "param_groups"
# Not upstream's, beside PARAM_GROUPS: the names of the parameters in each.
PARAM_NAMES = "param_names"
# Not upstream's: how many pieces (heads, say) of a parameter were dealt out to ranks that do not
# divide them; in a parameter's file, and in UNIVERSAL_CHECKPOINT_INFO with patterns of names.
PIECES = "pieces"
PARAMETER_WITH_PIECES = "parameter_with_pieces"
# What the client says of its slices, in UNIVERSAL_CHECKPOINT_INFO
ORIGINAL_VOCAB_SIZE = "original_vocab_size"
PADDED_VOCAB_SIZE = "padded_vocab_size"
VOCABULARY_PARAMETER_PATTERNS = "vocabulary_parameter_patterns"
PIPELINE_REPLICATED_PARAMETER_PATTERNS = "pipeline_replicated_parameter_patterns"
TP_REPLICATED_PARAMETER_PATTERNS = "tp_replicated_parameter_patterns"
PARAMETER_TO_AVERAGE_PATTERNS = "parameter_to_average_patterns"
PARAMETER_WITH_ROW_PARALLELISM_PATTERNS = "parameter_with_row_parallelism_patterns"
PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 = "parameter_with_2_sub_params_cat_dim_0"
PARAMETER_WITH_SUB_PARAMS = "parameter_with_sub_params"
