//! The device as cudarc sees it. Each test runs itself again in a child
//! process in which `libcuda.so.1` is this crate's library.

mod common;

use common::{kernels, on_device};
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use std::sync::Arc;

fn load(context: &Arc<CudaContext>) -> Arc<CudaModule> {
    let source = std::fs::read_to_string(kernels().join("basic.ptx")).unwrap();
    context.load_module(Ptx::from_src(source)).unwrap()
}

fn kernel(module: &Arc<CudaModule>, name: &str) -> CudaFunction {
    module.load_function(name).unwrap()
}

#[test]
fn vector_add() {
    on_device("vector_add", 2, || {
        let context = CudaContext::new(0).unwrap();
        let stream = context.default_stream();
        let module = load(&context);
        let n = 10_000usize;
        let a: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let b: Vec<f32> = (0..n).map(|i| 0.5 * i as f32).collect();
        let (da, db) = (stream.clone_htod(&a).unwrap(), stream.clone_htod(&b).unwrap());
        let mut out = stream.alloc_zeros::<f32>(n).unwrap();
        let function = kernel(&module, "vector_add");
        let mut launch = stream.launch_builder(&function);
        launch.arg(&da).arg(&db).arg(&mut out);
        let count = n as u32;
        launch.arg(&count);
        // SAFETY: the arguments are those of the kernel, of `n` elements each.
        unsafe { launch.launch(LaunchConfig::for_num_elems(n as u32)) }.unwrap();
        let got = stream.clone_dtoh(&out).unwrap();
        assert!(got.iter().enumerate().all(|(i, &v)| v == 1.5 * i as f32));
    });
}
