fn main() {
    for mode in [
        lb_user::datapath::load::Mode::Balance,
        lb_user::datapath::load::Mode::Observe,
    ] {
        let r = lb_user::datapath::load::load(
            &lb_user::datapath::load::Options {
                mode,
                sizes: Default::default(),
                features: 1 | 2,
                follow_connections: true,
            },
            None,
        );
        match r {
            Ok(e) => {
                for (n, p) in e.programs() {
                    if p.fd().is_ok() {
                        let i = p.info().unwrap();
                        println!(
                            "{n} {:?} {:?}",
                            i.verified_instruction_count(),
                            i.size_jitted()
                        );
                    }
                }
            }
            Err(e) => {
                println!("{e}");
                let mut s: &dyn std::error::Error = &e;
                while let Some(n) = s.source() {
                    println!("  {n}");
                    s = n;
                }
            }
        }
    }
}
