//! Why a kernel is not cut.

/// Why a kernel, or a whole image, has no cut form. The number is what crosses
/// process boundaries; it never changes its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[repr(u8)]
#[non_exhaustive]
pub enum Refusal {
    /// Neither PTX, nor a cubin, nor a fatbin.
    #[error("its image is of a kind that is not known")]
    UnknownImage = 1,
    /// The image breaks the rules of its format.
    #[error("its image is malformed")]
    Malformed = 2,
    /// The fatbin holds nothing for this GPU.
    #[error("its image holds no code for this GPU")]
    NoCodeForDevice = 3,
    /// The image does not hold the kernel.
    #[error("its image does not hold it")]
    NoSuchKernel = 4,
    /// No template of the prelude for this architecture (sm_100 and later need PTX).
    #[error("machine code of this architecture cannot be patched")]
    Architecture = 5,
    /// The first instruction is not the one that the patch knows.
    #[error("it starts with an instruction that the patch does not know")]
    FirstInstruction = 6,
    /// Something jumps to, or relocates, the first instruction.
    #[error("something refers to its first instruction")]
    EntryReferenced = 7,
    /// The image is a relocatable object.
    #[error("its image is a relocatable object")]
    Relocatable = 8,
    /// No room for the control block among the parameters.
    #[error("its parameters leave no room for the control block")]
    ParameterSpace = 9,
    /// Its metadata has a form that the patch does not know.
    #[error("its metadata has a form that the patch does not know")]
    Metadata = 10,
    /// Its image has global variables that a second copy of the image would double.
    #[error("its image has writable global variables")]
    WritableGlobals = 11,
    /// It launches kernels, or is launched, from the device.
    #[error("its image launches kernels from the device")]
    DeviceLaunch = 12,
    /// It waits for all blocks of its grid.
    #[error("it synchronises its whole grid")]
    GridSync = 13,
    /// Launched with programmatic dependence on another kernel.
    #[error("it depends on another kernel before that one's end")]
    ProgrammaticDependence = 14,
    /// Its cluster dimensions are no powers of two.
    #[error("its cluster dimensions are no powers of two")]
    ClusterShape = 15,
    /// A communication library's.
    #[error("it belongs to a communication library (NCCL, NVSHMEM)")]
    Communication = 16,
    /// Its blocks wait for one another, by its name.
    #[error("its name says that its blocks wait for one another")]
    BlocksWaitByName = 17,
    /// It did not end after it was asked to give way, and had to be rescued.
    #[error("its blocks waited for one another when it was cut")]
    BlocksWaited = 18,
    /// Its address is taken: somebody may call it as a function.
    #[error("its address is taken")]
    AddressTaken = 19,
    /// A function that it calls asks which block it is in (sub-grid form only).
    #[error("a function of its image reads the block's index")]
    IndexInFunction = 20,
    /// 32-bit addresses, or a PTX version before 6.0 that cannot be raised.
    #[error("its PTX is of a version that is not supported")]
    PtxVersion = 21,
    /// A closed NVIDIA library's, and `rewrite.vendor_libraries` is off.
    #[error("it belongs to a closed NVIDIA library and rewrite.vendor_libraries is off")]
    VendorLibrary = 22,
    /// The driver did not load the cut form.
    #[error("the driver refused its cut form")]
    DriverRefused = 23,
    /// The cut form's attributes differ from the original's.
    #[error("the attributes of its cut form differ")]
    AttributesDiffer = 24,
    /// A comparison of results failed.
    #[error("its cut form gave another result")]
    ResultsDiffer = 25,
    /// The image's bytes were not kept, or are not there any more.
    #[error("its image is not at hand")]
    ImageGone = 26,
    /// More than the table of kernels or handles holds.
    #[error("too many kernels are known")]
    TooMany = 27,
    /// Launched in a way that cannot be repeated with one more parameter.
    #[error("it is launched in a way that cannot be cut")]
    LaunchForm = 28,
    /// Rewriting is switched off.
    #[error("rewriting is switched off")]
    SwitchedOff = 29,
}

impl Refusal {
    /// All of them.
    pub const ALL: [Refusal; 29] = {
        use Refusal::*;
        [
            UnknownImage,
            Malformed,
            NoCodeForDevice,
            NoSuchKernel,
            Architecture,
            FirstInstruction,
            EntryReferenced,
            Relocatable,
            ParameterSpace,
            Metadata,
            WritableGlobals,
            DeviceLaunch,
            GridSync,
            ProgrammaticDependence,
            ClusterShape,
            Communication,
            BlocksWaitByName,
            BlocksWaited,
            AddressTaken,
            IndexInFunction,
            PtxVersion,
            VendorLibrary,
            DriverRefused,
            AttributesDiffer,
            ResultsDiffer,
            ImageGone,
            TooMany,
            LaunchForm,
            SwitchedOff,
        ]
    };

    /// The number.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The refusal of a number.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|r| r.code() == code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_leads_back() {
        for (i, r) in Refusal::ALL.into_iter().enumerate() {
            assert_eq!(r.code() as usize, i + 1);
            assert_eq!(Refusal::from_code(r.code()), Some(r));
        }
        assert_eq!(Refusal::from_code(0), None);
    }
}
