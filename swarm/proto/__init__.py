"""The protobuf of the gRPC services, and the code generated from it (`make proto`); a test keeps that current."""
