//! Why a kernel is not transformed.

/// Why a kernel, or a whole image, has no transformed form. The number is what crosses
/// process boundaries; it never changes its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum TransformRefusal {
    /// Neither PTX, nor a cubin, nor a fatbin.
    UnknownImage = 1,
    /// The image breaks the rules of its format.
    Malformed = 2,
    /// The fatbin holds nothing for this GPU.
    NoCodeForDevice = 3,
    /// The image does not hold the kernel.
    NoSuchKernel = 4,
    /// No template of the prelude for this architecture (sm_100 and later need PTX).
    Architecture = 5,
    /// The first instruction is not the one that the patch knows.
    FirstInstruction = 6,
    /// Something jumps to, or relocates, the first instruction.
    EntryReferenced = 7,
    /// The image is a relocatable object.
    Relocatable = 8,
    /// No room for the control block among the parameters.
    ParameterSpace = 9,
    /// Its metadata has a form that the patch does not know.
    Metadata = 10,
    /// Its image has global variables that a second copy of the image would double.
    WritableGlobals = 11,
    /// It launches kernels, or is launched, from the device.
    DeviceLaunch = 12,
    /// It waits for all blocks of its grid.
    GridSync = 13,
    /// Launched with programmatic dependence on another kernel.
    ProgrammaticDependence = 14,
    /// Its cluster dimensions are no powers of two.
    ClusterShape = 15,
    /// It belongs to a communication library (NCCL, NVSHMEM), by its name.
    Communication = 16,
    /// Its blocks wait for one another, by its name.
    BlocksWaitByName = 17,
    /// It did not end after it was asked to yield, and had to be rescued.
    BlocksWaited = 18,
    /// Its address is taken: somebody may call it as a function. Or it takes a function's, which is another number in
    /// another module.
    AddressTaken = 19,
    /// A function that it calls asks which block it is in, or might: it is called by its address (form by offset only).
    IndexInFunction = 20,
    /// 32-bit addresses, or a PTX version before 6.0 that cannot be raised.
    PtxVersion = 21,
    /// A closed NVIDIA library's, and `rewrite.vendor_libraries` is off.
    VendorLibrary = 22,
    /// The driver did not load the transformed form.
    DriverRefused = 23,
    /// The transformed form's attributes differ from the original's.
    AttributesDiffer = 24,
    /// The image's bytes were not kept, or are not there any more.
    ImageGone = 25,
    /// Launched in a way that cannot be repeated with one more parameter, or it asks which launch it is of.
    LaunchForm = 26,
    /// A kernel with known results computed others on this GPU when it was transformed.
    ResultsDiffer = 27,
    /// Its machine code reads the block's index, or the grid's width, in a way that the patch
    /// does not know (form by offset only).
    IndexRead = 28,
    /// Its machine code leaves no register free that the patch could use (form by offset only).
    NoSpareRegister = 29,
    /// Its code lets its blocks wait for one another: held back in part they might do so for ever.
    BlocksMayWait = 30,
    /// The GPU's memory was full when the driver was to load the transformed form.
    OutOfMemory = 31,
    /// On some of the SMs it did not end.
    StuckLimited = 32,
    /// The fatbin holds more than one code for this GPU: which of them the driver uses is not known.
    SeveralCodes = 33,
    /// There was not enough memory to rewrite its image.
    HostMemory = 34,
    /// The program installed a seccomp filter before its form was made.
    Sandboxed = 35,
}

impl TransformRefusal {
    pub const ALL: [TransformRefusal; 35] = {
        use TransformRefusal::*;
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
            ImageGone,
            LaunchForm,
            ResultsDiffer,
            IndexRead,
            NoSpareRegister,
            BlocksMayWait,
            OutOfMemory,
            StuckLimited,
            SeveralCodes,
            HostMemory,
            Sandboxed,
        ]
    };

    pub fn text(self) -> &'static str {
        match self {
            TransformRefusal::UnknownImage => "its image is of a kind that is not known",
            TransformRefusal::Malformed => "its image is malformed",
            TransformRefusal::NoCodeForDevice => "its image holds no code for this GPU",
            TransformRefusal::NoSuchKernel => "its image does not hold it",
            TransformRefusal::Architecture => "machine code of this architecture cannot be patched",
            TransformRefusal::FirstInstruction => {
                "it starts with an instruction that the patch does not know"
            }
            TransformRefusal::EntryReferenced => "something refers to its first instruction",
            TransformRefusal::Relocatable => "its image is a relocatable object",
            TransformRefusal::ParameterSpace => {
                "its parameters leave no room for the control block"
            }
            TransformRefusal::Metadata => "its metadata has a form that the patch does not know",
            TransformRefusal::WritableGlobals => "its image has writable global variables",
            TransformRefusal::DeviceLaunch => "its image launches kernels from the device",
            TransformRefusal::GridSync => "it synchronises its whole grid",
            TransformRefusal::ProgrammaticDependence => {
                "it depends on another kernel before that one's end"
            }
            TransformRefusal::ClusterShape => "its cluster dimensions are no powers of two",
            TransformRefusal::Communication => {
                "it belongs to a communication library (NCCL, NVSHMEM)"
            }
            TransformRefusal::BlocksWaitByName => {
                "its name says that its blocks wait for one another"
            }
            TransformRefusal::BlocksWaited => {
                "its blocks waited for one another when it was transformed"
            }
            TransformRefusal::AddressTaken => "its address, or one of its functions', is taken",
            TransformRefusal::IndexInFunction => {
                "a function that it calls, or may call, reads the block's index"
            }
            TransformRefusal::PtxVersion => "its PTX is of a version that is not supported",
            TransformRefusal::VendorLibrary => {
                "it belongs to a closed NVIDIA library and rewrite.vendor_libraries is off"
            }
            TransformRefusal::DriverRefused => "the driver refused its transformed form",
            TransformRefusal::AttributesDiffer => "the attributes of its transformed form differ",
            TransformRefusal::ImageGone => "its image is not at hand",
            TransformRefusal::LaunchForm => "it is launched in a way that cannot be transformed",
            TransformRefusal::ResultsDiffer => {
                "a kernel with known results computed others on this GPU when it was transformed"
            }
            TransformRefusal::IndexRead => {
                "it reads the block's index in a way that the patch does not know"
            }
            TransformRefusal::NoSpareRegister => "it leaves no register free for the patch",
            TransformRefusal::BlocksMayWait => "its code lets its blocks wait for one another",
            TransformRefusal::OutOfMemory => {
                "the GPU's memory was full when its transformed form was to be loaded"
            }
            TransformRefusal::StuckLimited => {
                "it did not end when it was limited to some of the SMs"
            }
            TransformRefusal::SeveralCodes => "its image holds several codes for this GPU",
            TransformRefusal::HostMemory => {
                "the process has too little memory left to rewrite its image"
            }
            TransformRefusal::Sandboxed => {
                "the program installed a seccomp filter before its transformed form was made"
            }
        }
    }

    pub fn code(self) -> u8 {
        self as u8
    }

    /// Whether only running the kernel could show it: worth keeping, because finding
    /// out again costs a launch that does not end, or a load in vain.
    pub fn is_profiled(self) -> bool {
        use TransformRefusal::{AttributesDiffer, BlocksWaited, DriverRefused, StuckLimited};
        matches!(self, BlocksWaited | DriverRefused | AttributesDiffer | StuckLimited)
    }

    /// The refusal that [`TransformRefusal::text`] says so of.
    pub fn from_text(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|r| r.text() == text)
    }

    /// The refusal of a number.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|r| r.code() == code)
    }
}

impl std::fmt::Display for TransformRefusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.text())
    }
}

impl std::error::Error for TransformRefusal {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_and_every_text_leads_back() {
        for (i, r) in TransformRefusal::ALL.into_iter().enumerate() {
            assert_eq!(r.code() as usize, i + 1);
            assert_eq!(TransformRefusal::from_code(r.code()), Some(r));
            assert_eq!(TransformRefusal::from_text(r.text()), Some(r));
        }
        assert_eq!(TransformRefusal::from_code(0), None);
    }
}
